// Reads an expert program out of the sub-graph that the scheduler hands to the hook.
#pragma once

#include "ggml_abi.h"
#include "program.h"

namespace kvasir {

// What one sub-graph is: a layer's program and the three tensors at its border.
struct Capture {
    int layer = -1;
    Program program;
    const ggml::Tensor * x   = nullptr; // [n_embd, 1 or n_slots, n_tokens] F32
    const ggml::Tensor * ids = nullptr; // [n_slots, n_tokens] I32, rows may be apart
    ggml::Tensor * out       = nullptr; // [n_embd, n_slots, n_tokens] F32, contiguous
    char fault[160]          = "";      // why the sub-graph is not an expert program; "" when it is
};

// Whether `tensor` lies in a buffer of type `ours` (that is, belongs to routed experts), itself or as a view.
bool is_expert_tensor(const ggml::Tensor * tensor, const ggml::BufferType * ours);

// Whether the hook takes this node: it is computed from experts' tensors and from nothing that is not itself
// taken, but for the rows and ids that enter at a MUL_MAT_ID.
bool is_taken(const ggml::Tensor * node, const ggml::BufferType * ours);

// The sub-graph's output node: the last one that computes; nullptr when there is none.
ggml::Tensor * output_of(ggml::Graph * graph);

// Fills `capture`; reuses its memory. False, with `fault` set, for a sub-graph that is not one expert
// program.
bool capture_program(ggml::Graph * graph, const ggml::BufferType * ours, Capture & capture);

} // namespace kvasir
