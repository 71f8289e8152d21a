// Activations in the form that the weights' type asks for, rounded as ggml's CPU backend rounds them
// (kvasir_node/kernels/activation_formats.py says it value by value, and a device that differs is refused).
//
// In: rows of `width` floats. Out: rows of `stride` numbers, a multiple of 32, zeros behind the row's end. One
// work-item rounds one block of one row. A block with a number that is not finite gets a step that is not a
// number, so that whatever is computed from it shows that too.

#pragma OPENCL FP_CONTRACT OFF
#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif

// A quotient rounded once. OpenCL promises 2.5 units in the last place; by way of doubles it is exact.
float quotient(float a, float b) {
#ifdef cl_khr_fp64
    return (float)((double)a / (double)b);
#else
    return a / b;
#endif
}

// The F16 nearest to a number, as a float: also where a device has no F16 arithmetic.
float nearest_half(float value) {
    ushort bits[1];
    vstore_half_rte(value, 0, (half *)bits);
    return vload_half(0, (half *)bits);
}

__kernel void round_f32(__global const float * restrict rows, int width, int stride, __global float * restrict out) {
    const size_t column = get_global_id(0);
    if (column < (size_t)stride) {
        const size_t row           = get_global_id(1);
        out[row * stride + column] = column < (size_t)width ? rows[row * width + column] : 0.0f;
    }
}

__kernel void round_f16(__global const float * restrict rows, int width, int stride, __global half * restrict out) {
    const size_t column = get_global_id(0);
    if (column < (size_t)stride) {
        const size_t row = get_global_id(1);
        vstore_half_rte(column < (size_t)width ? rows[row * width + column] : 0.0f, row * stride + column, out);
    }
}

// Blocks of 32: the step is the largest value's 127th part, kept as F16; quants are rounded with its exact
// reciprocal.
__kernel void round_q8_0(__global const float * restrict rows, int width, __global char * restrict quants,
                         __global float * restrict steps) {
    const size_t block = get_global_id(0);
    if (block >= (size_t)(width / 32)) {
        return;
    }
    const size_t row             = get_global_id(1);
    const size_t begin           = row * width + block * 32;
    __global const float * given = rows + begin;
    float largest                = 0.0f;
    int finite                   = 1;
    for (int i = 0; i < 32; ++i) {
        finite &= isfinite(given[i]);
        largest = fmax(largest, fabs(given[i]));
    }
    const float inverse = largest > 0.0f ? quotient(127.0f, largest) : 0.0f;
    for (int i = 0; i < 32; ++i) {
        quants[begin + i] = finite ? convert_char_sat(rint(given[i] * inverse)) : (char)1;
    }
    steps[row * (width / 32) + block] = finite ? nearest_half(quotient(largest, 127.0f)) : NAN;
}

// Blocks of 256: an F32 step, with the value of largest size (the first of equals) at -127.
__kernel void round_q8_k(__global const float * restrict rows, int width, __global char * restrict quants,
                         __global float * restrict steps) {
    const size_t block = get_global_id(0);
    if (block >= (size_t)(width / 256)) {
        return;
    }
    const size_t row             = get_global_id(1);
    const size_t begin           = row * width + block * 256;
    __global const float * given = rows + begin;
    float extreme                = 0.0f;
    int finite                   = 1;
    for (int i = 0; i < 256; ++i) {
        finite &= isfinite(given[i]);
        extreme = fabs(given[i]) > fabs(extreme) ? given[i] : extreme;
    }
    const float inverse = extreme != 0.0f ? quotient(-127.0f, extreme) : 0.0f;
    for (int i = 0; i < 256; ++i) {
        quants[begin + i] = finite ? (char)fmin(rint(given[i] * inverse), 127.0f) : (char)1;
    }
    const float step                   = inverse != 0.0f ? quotient(1.0f, inverse) : 0.0f;
    steps[row * (width / 256) + block] = finite ? step : NAN;
}
