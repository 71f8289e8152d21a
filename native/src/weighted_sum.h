// One step of a weighted sum, the same for a worker and for a tail that the hook evaluates itself.
#pragma once

#include <cstdint>

namespace kvasir {

// sum = weight x row when `first`, else sum += weight x row. The product is rounded to F32 before it is added
// (the build says -ffp-contract=off), as ggml's MUL and ADD do.
inline void add_product(const float * row, float weight, bool first, int32_t n, float * sum) {
    if (first) {
        for (int32_t i = 0; i < n; ++i) {
            sum[i] = row[i] * weight;
        }
    } else {
        for (int32_t i = 0; i < n; ++i) {
            sum[i] += row[i] * weight;
        }
    }
}

} // namespace kvasir
