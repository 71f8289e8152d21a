// The steps of expert programs that work on each number by itself: biases, scales, gates, functions.
//
// kvasir_proto/program.py says what a step means, kvasir_node/kernels/expert_functions.py the same in numpy. Kinds
// have the numbers they have there. What is not a number stays so: a result that was lost must not look like one.
// One work-item computes one number; the second dimension counts pairs. `tables` is that of products.cl.

#pragma OPENCL FP_CONTRACT OFF

float at_least(float value, float low) { return isnan(value) ? value : fmax(value, low); }

float at_most(float value, float high) { return isnan(value) ? value : fmin(value, high); }

float swish(float value, float slope) { return value / (1.0f + exp(-slope * value)); }

// A function that ggml looks up: its F16 results for each F16 number.
float from_table(__global const float * table, float value) {
    ushort bits[1];
    vstore_half_rte(value, 0, (half *)bits);
    return table[bits[0]];
}

float gelu(__global const float * table, float value) {
    return value <= -10.0f ? 0.0f : value >= 10.0f ? value : from_table(table, value);
}

float gelu_erf(float value) { return 0.5f * value * (1.0f + erf(value * M_SQRT1_2_F)); }

float hard_sigmoid(float value) { return at_most(at_least((value + 3.0f) / 6.0f, 0.0f), 1.0f); }

#define GELU_QUICK_TABLE 65536 // the second table begins there

__kernel void add_bias(__global const float * restrict a, int width, __global const float * restrict bias,
                       __global const int * restrict tables, int n_pairs, __global float * restrict out) {
    const size_t column = get_global_id(0);
    const size_t pair   = get_global_id(1);
    if (column < (size_t)width) {
        out[pair * width + column] = a[pair * width + column] + bias[(size_t)tables[n_pairs + pair] * width + column];
    }
}

__kernel void take_scale(__global const float * restrict scales, __global const int * restrict tables,
                         int n_pairs, __global float * restrict out) {
    const size_t pair = get_global_id(1);
    if (get_global_id(0) == 0) {
        out[pair] = scales[tables[n_pairs + pair]];
    }
}

__kernel void gated_unit(__global const float * restrict gates, int gates_stride, int gates_first,
                         __global const float * restrict ups, int ups_stride, int ups_first, int width, int kind,
                         float alpha, float limit, __global const float * restrict tables,
                         __global float * restrict out) {
    const size_t column = get_global_id(0);
    const size_t pair   = get_global_id(1);
    if (column >= (size_t)width) {
        return;
    }
    float gate = gates[pair * gates_stride + gates_first + column];
    float up   = ups[pair * ups_stride + ups_first + column];
    switch (kind) {
        case 0: gate = at_least(gate, 0.0f); break;
        case 1: gate = gelu(tables, gate); break;
        case 2: gate = swish(gate, 1.0f); break;
        case 3:
            gate = swish(at_most(gate, limit), alpha);
            up   = at_most(at_least(up, -limit), limit) + 1.0f;
            break;
        case 4: gate = gelu_erf(gate); break;
        case 5: gate = from_table(tables + GELU_QUICK_TABLE, gate); break;
        case 6:
            gate = swish(at_most(gate, limit), 1.0f);
            up   = at_most(at_least(up, -limit), limit);
            break;
        default: gate = NAN;
    }
    out[pair * width + column] = gate * up;
}

__kernel void apply_function(__global const float * restrict a, int width, int kind,
                             __global const float * restrict tables, __global float * restrict out) {
    const size_t column = get_global_id(0);
    const size_t pair   = get_global_id(1);
    if (column >= (size_t)width) {
        return;
    }
    float x = a[pair * width + column];
    switch (kind) {
        case 0: x = fabs(x); break;
        case 1: x = isnan(x) ? x : sign(x); break;
        case 2: x = -x; break;
        case 3: x = x > 0.0f ? 1.0f : 0.0f; break;
        case 4: x = tanh(x); break;
        case 5: x = x > 0.0f ? x : expm1(x); break;
        case 6: x = at_least(x, 0.0f); break;
        case 7: x = 1.0f / (1.0f + exp(-x)); break;
        case 8: x = gelu(tables, x); break;
        case 9: x = from_table(tables + GELU_QUICK_TABLE, x); break;
        case 10: x = swish(x, 1.0f); break;
        case 11: x = x * hard_sigmoid(x); break;
        case 12: x = hard_sigmoid(x); break;
        case 13: x = exp(x); break;
        case 14: x = expm1(x); break;
        case 15: x = x > 20.0f ? x : log1p(exp(x)); break;
        case 16: x = gelu_erf(x); break;
        default: x = NAN;
    }
    out[pair * width + column] = x;
}

__kernel void square(__global const float * restrict a, int width, __global float * restrict out) {
    const size_t column = get_global_id(0);
    const size_t index  = get_global_id(1) * width + column;
    if (column < (size_t)width) {
        out[index] = a[index] * a[index];
    }
}

__kernel void clamp_between(__global const float * restrict a, int width, float low, float high,
                            __global float * restrict out) {
    const size_t column = get_global_id(0);
    const size_t index  = get_global_id(1) * width + column;
    if (column < (size_t)width) {
        out[index] = at_most(at_least(a[index], low), high);
    }
}

__kernel void linear(__global const float * restrict a, int width, float factor, float summand,
                     __global float * restrict out) {
    const size_t column = get_global_id(0);
    const size_t index  = get_global_id(1) * width + column;
    if (column < (size_t)width) {
        out[index] = a[index] * factor + summand;
    }
}

__kernel void multiply(__global const float * restrict a, int width, __global const float * restrict b, int b_width,
                       __global float * restrict out) {
    const size_t column = get_global_id(0);
    const size_t pair   = get_global_id(1);
    if (column < (size_t)width) {
        out[pair * width + column] = a[pair * width + column] * b[pair * b_width + (b_width == 1 ? 0 : column)];
    }
}

__kernel void slice(__global const float * restrict a, int a_width, int first, int width,
                    __global float * restrict out) {
    const size_t column = get_global_id(0);
    const size_t pair   = get_global_id(1);
    if (column < (size_t)width) {
        out[pair * width + column] = a[pair * a_width + first + column];
    }
}
