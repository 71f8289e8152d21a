// Expert programs: what one is, and when one is well formed. Knows nothing of a layer's shapes or of ggml.
#pragma once

#include "kvasir_native.h"

#include <vector>

namespace kvasir {

struct Program {
    std::vector<kvasir_program_step> steps;
    bool input_per_slot = false;

    bool operator==(const Program & other) const;
};

constexpr int tensor_code(int part, int kind) { return part * 3 + kind; }

constexpr int tensor_kind(int code) { return code % 3; }

// nullptr for a program that is well formed, otherwise what is wrong with it. Every reference of a well
// formed program points backwards, every parameter is in range and every value is used.
const char * program_fault(const kvasir_program_step * steps, int n_steps);

} // namespace kvasir
