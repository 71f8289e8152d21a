// The structural check of expert programs. A program may come from another machine: whatever passes here (and
// then fits a layer's widths, kernel.cpp) must be safe to hand to ggml, whose own checks abort the process.
#include "program.h"

#include <cmath>
#include <cstring>

namespace kvasir {

namespace {

constexpr int kGluKinds   = 7;  // reglu .. swiglu_clamp, numbered as ggml 0.25.3 does
constexpr int kUnaryKinds = 17; // abs .. gelu_erf: those without further parameters

float float_of(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

bool is_precision(int32_t value) {
    return value == 0 || value == 10 || value == 15 || value == 20 || value == 30 || value == 40;
}

bool params_zero_from(const kvasir_program_step & step, int first) {
    for (int i = first; i < 4; ++i) {
        if (step.params[i] != 0) {
            return false;
        }
    }
    return true;
}

const char * tensor_fault(const kvasir_program_step & step) {
    int kind = -1;
    switch (step.op) {
        case KVASIR_OP_EXPERT_MATMUL: kind = KVASIR_KIND_WEIGHT; break;
        case KVASIR_OP_EXPERT_ADD: kind = KVASIR_KIND_BIAS; break;
        case KVASIR_OP_EXPERT_SCALE: kind = KVASIR_KIND_SCALE; break;
        default: return step.tensor == -1 ? nullptr : "a step names a tensor that it cannot use";
    }
    if (step.tensor < 0 || step.tensor >= KVASIR_TENSOR_COUNT || tensor_kind(step.tensor) != kind) {
        return "a step names a tensor of the wrong kind";
    }
    return nullptr;
}

const char * input_fault(const kvasir_program_step * steps, int i) {
    const kvasir_program_step & step = steps[i];
    if (step.op == KVASIR_OP_EXPERT_SCALE) {
        return step.input_a == KVASIR_VALUE_ABSENT && step.input_b == KVASIR_VALUE_ABSENT
                   ? nullptr
                   : "a step takes an input that it has no use for";
    }
    const int first = step.op == KVASIR_OP_EXPERT_MATMUL ? 0 : 1; // only a matmul reads the input row
    if (step.input_a < first || step.input_a > i) {
        return "a step's input is not an earlier value";
    }
    const bool b_given    = step.input_b != KVASIR_VALUE_ABSENT;
    const bool b_needed   = step.op == KVASIR_OP_MULTIPLY;
    const bool b_possible = b_needed || step.op == KVASIR_OP_GLU;
    if ((b_given && !b_possible) || (!b_given && b_needed)) {
        return "a step has the wrong number of inputs";
    }
    if (b_given && (step.input_b < 1 || step.input_b > i)) {
        return "a step's input is not an earlier value";
    }
    const bool a_is_slice = step.input_a > 0 && steps[step.input_a - 1].op == KVASIR_OP_SLICE;
    if (a_is_slice && (step.op == KVASIR_OP_SLICE || step.op == KVASIR_OP_LINEAR)) {
        return "a step cannot work on a slice";
    }
    return nullptr;
}

const char * params_fault(const kvasir_program_step & step) {
    const int32_t * p = step.params;
    switch (step.op) {
        case KVASIR_OP_EXPERT_MATMUL:
            return is_precision(p[0]) && p[1] == 0 && p[2] == 0 && is_precision(p[3])
                       ? nullptr
                       : "a matmul's precision is not known";
        case KVASIR_OP_GLU: {
            const bool swapped_fits = p[1] == 0 || (p[1] == 1 && step.input_b == KVASIR_VALUE_ABSENT);
            return p[0] >= 0 && p[0] < kGluKinds && swapped_fits && std::isfinite(float_of(p[2])) &&
                           std::isfinite(float_of(p[3]))
                       ? nullptr
                       : "a gated unit's parameters are out of range";
        }
        case KVASIR_OP_UNARY:
            return p[0] >= 0 && p[0] < kUnaryKinds && params_zero_from(step, 1)
                       ? nullptr
                       : "a unary function is not known";
        case KVASIR_OP_CLAMP:
            return float_of(p[0]) <= float_of(p[1]) && params_zero_from(step, 2) ? nullptr
                                                                                 : "a clamp has no range";
        case KVASIR_OP_LINEAR:
            return std::isfinite(float_of(p[0])) && std::isfinite(float_of(p[1])) && params_zero_from(step, 2)
                       ? nullptr
                       : "a linear step's factors are not finite";
        case KVASIR_OP_SLICE:
            return p[0] >= 0 && p[1] > 0 && params_zero_from(step, 2) ? nullptr : "a slice is empty";
        default: return params_zero_from(step, 0) ? nullptr : "a step has parameters that it cannot use";
    }
}

} // namespace

bool Program::operator==(const Program & other) const {
    return input_per_slot == other.input_per_slot && steps.size() == other.steps.size() &&
           std::memcmp(steps.data(), other.steps.data(), steps.size() * sizeof steps[0]) == 0;
}

const char * program_fault(const kvasir_program_step * steps, int n_steps) {
    if (n_steps < 1 || n_steps > KVASIR_PROGRAM_STEPS_MAX) {
        return "a program has 1 to 32 steps";
    }
    bool used[KVASIR_PROGRAM_STEPS_MAX + 1] = {};
    int n_matmul                            = 0;
    for (int i = 0; i < n_steps; ++i) {
        const kvasir_program_step & step = steps[i];
        if (step.op < KVASIR_OP_EXPERT_MATMUL || step.op > KVASIR_OP_SLICE) {
            return "a step's operation is not known";
        }
        const char * fault = tensor_fault(step);
        fault              = fault ? fault : input_fault(steps, i);
        fault              = fault ? fault : params_fault(step);
        if (fault) {
            return fault;
        }
        n_matmul += step.op == KVASIR_OP_EXPERT_MATMUL;
        if (step.input_a >= 0) {
            used[step.input_a] = true;
        }
        if (step.input_b >= 0) {
            used[step.input_b] = true;
        }
    }
    for (int value = 0; value < n_steps; ++value) {
        if (!used[value]) {
            return value == 0 ? "the input row is not used" : "a step's value is not used";
        }
    }
    if (n_matmul > KVASIR_PROGRAM_MATMULS_MAX) {
        return "a program has at most 8 matrix products";
    }
    const int last = steps[n_steps - 1].op;
    if (last == KVASIR_OP_SLICE || last == KVASIR_OP_EXPERT_SCALE) {
        return "the last step cannot be an output";
    }
    return nullptr;
}

} // namespace kvasir
