// Products of experts' weights with activations, for one type of weights and one kind of accumulator.
//
// Defined by whoever builds this: WEIGHTS_F32, _F16, _Q8_0 or _Q4_K, which fixes the form of the activations as
// in ggml (F32, F16, Q8_0, Q8_K; activations.cl makes them), SUMS_F32, SUMS_F16 or SUMS_MIXED (F16 inside blocks
// of 256 columns, F32 across), and TILE, how many pairs share one reading of the weights at most. Weights are expanded 16 at a time, as ggml expands them. Sixteen partial
// sums run along the columns and are added as a tree at the end, in the same order whatever else is in the call.
//
// `tables` has, one behind the other: each pair's row, each pair's place among the experts that are held, the pairs
// ordered by expert, and where in that order each tile begins and ends. A tile has pairs of one expert
// only; one work-item computes one output column of one tile. Rows lie padded to a multiple of 32 columns.

#pragma OPENCL FP_CONTRACT OFF

#define LANES 16
#define MIXED_BLOCK 256

// ---- Weights and activations, sixteen columns at a time ----

#if defined(WEIGHTS_F32)
#define ACTIVATION float
#define STEPS_BLOCK 0
float16 weights_at(__global const uchar * row, int column) {
    return vload16(0, (__global const float *)row + column);
}
#elif defined(WEIGHTS_F16)
#define ACTIVATION half
#define STEPS_BLOCK 0
float16 weights_at(__global const uchar * row, int column) {
    return vload_half16(0, (__global const half *)row + column);
}
#elif defined(WEIGHTS_Q8_0)
#define ACTIVATION char
#define STEPS_BLOCK 32
float16 weights_at(__global const uchar * row, int column) {
    __global const uchar * block = row + (column / 32) * 34;
    const float step             = vload_half(0, (__global const half *)block);
    return convert_float16(vload16(0, (__global const char *)(block + 2 + column % 32))) * step;
}
#elif defined(WEIGHTS_Q4_K)
#define ACTIVATION char
#define STEPS_BLOCK 256
float16 weights_at(__global const uchar * row, int column) {
    __global const uchar * block  = row + (column / 256) * 144;
    __global const uchar * scales = block + 4;
    const int part                = column % 256 / 32;
    const int scale   = part < 4 ? scales[part] & 63 : (scales[part + 4] & 15) | (scales[part - 4] >> 6 << 4);
    const int minimum = part < 4 ? scales[part + 4] & 63 : (scales[part + 4] >> 4) | (scales[part] >> 6 << 4);
    const uchar16 bytes  = vload16(0, block + 16 + part / 2 * 32 + column % 32);
    const uchar16 quants = part % 2 ? bytes >> (uchar)4 : bytes & (uchar)15;
    const float step     = vload_half(0, (__global const half *)block) * (float)scale;
    const float offset   = vload_half(1, (__global const half *)block) * (float)minimum;
    return convert_float16(quants) * step - offset;
}
#endif

#if STEPS_BLOCK
#define STEPS_OF_ROW(n_in) ((n_in) / STEPS_BLOCK)
#else
#define STEPS_OF_ROW(n_in) 0
#endif

float16 activations_at(__global const ACTIVATION * row, __global const float * steps, int column) {
#if STEPS_BLOCK
    return convert_float16(vload16(0, row + column)) * steps[column / STEPS_BLOCK];
#elif defined(WEIGHTS_F16)
    return vload_half16(0, row + column);
#else
    return vload16(0, row + column);
#endif
}

// ---- Accumulators ----

#ifdef FP_FAST_FMAF
#define ADD_PRODUCT(a, b, sum) fma(a, b, sum)
#else
#define ADD_PRODUCT(a, b, sum) ((a) * (b) + (sum))
#endif

#if defined(SUMS_F32)
typedef float16 Sums;

float total(Sums sums) {
    const float8 eight = sums.lo + sums.hi;
    const float4 four  = eight.lo + eight.hi;
    const float2 two   = four.lo + four.hi;
    return two.lo + two.hi;
}
#define ADD(sums, weights, activations) ADD_PRODUCT(weights, activations, sums)

#else // F16, by itself or inside blocks

#ifdef cl_khr_fp16
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef half16 Sums;

half total_f16(Sums sums) {
    const half8 eight = sums.lo + sums.hi;
    const half4 four  = eight.lo + eight.hi;
    const half2 two   = four.lo + four.hi;
    return two.lo + two.hi;
}
#define ADD(sums, weights, activations) fma(convert_half16(weights), convert_half16(activations), sums)
#define WIDEN(sums) convert_float16(sums)

#else // no F16 arithmetic: what it would give, by rounding each step
typedef float16 Sums;

float16 halves(float16 values) {
    ushort bits[16];
    vstore_half16_rte(values, 0, (half *)bits);
    return vload_half16(0, (half *)bits);
}

float total_f16(Sums sums) {
    sums.lo = halves((float16)(sums.lo + sums.hi, (float8)(0))).lo;
    sums.lo.lo = halves((float16)(sums.lo.lo + sums.lo.hi, (float4)(0), (float8)(0))).lo.lo;
    sums.lo.lo.lo = halves((float16)(sums.lo.lo.lo + sums.lo.lo.hi, (float2)(0), (float4)(0), (float8)(0))).lo.lo.lo;
    return halves((float16)(sums.s0 + sums.s1)).s0;
}
#define ADD(sums, weights, activations) halves(fma(halves(weights), halves(activations), sums))
#define WIDEN(sums) (sums)
#endif

#if defined(SUMS_F16)
float total(Sums sums) { return total_f16(sums); }
#else
float total(float16 sums) {
    const float8 eight = sums.lo + sums.hi;
    const float4 four  = eight.lo + eight.hi;
    const float2 two   = four.lo + four.hi;
    return two.lo + two.hi;
}
#endif
#endif

// ---- The product ----

__kernel void multiply(__global const uchar * restrict weights, ulong row_bytes, int n_in, int n_out,
                       __global const ACTIVATION * restrict activations, int stride,
                       __global const float * restrict steps, int by_row, __global const int * restrict tables,
                       int n_pairs, int first_tile, __global float * restrict out) {
    const size_t column_out = get_global_id(0);
    if (column_out >= (size_t)n_out) {
        return;
    }
    __global const int * row_of_pair   = tables;
    __global const int * local_of_pair = tables + n_pairs;
    __global const int * order         = tables + 2 * n_pairs;
    __global const int * tile          = tables + 3 * n_pairs + 2 * (first_tile + get_global_id(1));
    const int begin                    = tile[0];
    const int last                     = tile[1] - 1;
    const ulong expert                 = local_of_pair[order[begin]];
    __global const uchar * row         = weights + (expert * n_out + column_out) * row_bytes;
    __global const ACTIVATION * given[TILE];
    __global const float * given_steps[TILE];
    Sums sums[TILE];
#ifdef SUMS_MIXED
    float16 across[TILE];
#endif
    for (int i = 0; i < TILE; ++i) {
        const int pair     = order[min(begin + i, last)];
        const ulong source = by_row ? row_of_pair[pair] : pair;
        given[i]           = activations + source * stride;
        given_steps[i]     = steps + source * STEPS_OF_ROW(n_in);
        sums[i]            = (Sums)(0);
#ifdef SUMS_MIXED
        across[i] = (float16)(0);
#endif
    }
    for (int column = 0; column < n_in; column += 2 * LANES) {
        const float16 left  = weights_at(row, column);
        const float16 right = weights_at(row, column + LANES);
        for (int i = 0; i < TILE; ++i) {
            sums[i] = ADD(sums[i], left, activations_at(given[i], given_steps[i], column));
            sums[i] = ADD(sums[i], right, activations_at(given[i], given_steps[i], column + LANES));
        }
#ifdef SUMS_MIXED
        if ((column + 2 * LANES) % MIXED_BLOCK == 0 || column + 2 * LANES >= n_in) {
            for (int i = 0; i < TILE; ++i) {
                across[i] += WIDEN(sums[i]);
                sums[i] = (Sums)(0);
            }
        }
#endif
    }
    for (int i = 0; i < TILE && begin + i <= last; ++i) {
#ifdef SUMS_MIXED
        out[(ulong)order[begin + i] * n_out + column_out] = total(across[i]);
#else
        out[(ulong)order[begin + i] * n_out + column_out] = total(sums[i]);
#endif
    }
}
