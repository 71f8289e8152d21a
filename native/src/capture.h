// Reads an expert program out of the sub-graph that the scheduler hands to the hook.
#pragma once

#include "ggml_abi.h"
#include "program.h"

#include <vector>

namespace kvasir {

// What may follow an expert program and be taken with it, node by node: the rows times the router's weights
// (MUL with [1, n_slots, n_tokens] from outside), and the slots of that added one after another, from slot 0 on
// (ADD of VIEWs). A sub-graph may end after any of these nodes, as the model's graph has it.
struct Tail {
    const ggml::Tensor * weighted = nullptr; // the MUL; nullptr without a tail
    int64_t n_summed              = 0;       // 0: its rows as they are; else slots 0 .. n_summed - 1 added up

    const ggml::Tensor * rows() const { return weighted->src[0]; }
    const ggml::Tensor * weights() const { return weighted->src[1]; }
};

// What one sub-graph is: a layer's program, its tail, and the tensors at its border.
struct Capture {
    int layer = -1;
    Program program;
    Tail tail;
    const ggml::Tensor * x   = nullptr; // [n_embd, 1 or n_slots, n_tokens] F32
    const ggml::Tensor * ids = nullptr; // [n_slots, n_tokens] I32, rows may be apart
    ggml::Tensor * out       = nullptr; // [n_embd, n_slots, n_tokens] F32, contiguous; added up: no slots
    int64_t n_slots          = 0;
    int64_t n_tokens         = 0;
    char fault[160]          = "";      // why the sub-graph is not an expert program; "" when it is
};

// By layer: whether its tail is to be taken. Shorter than the model has layers: not in those beyond.
using SumLayers = std::vector<bool>;

// Whether `tensor` lies in a buffer of type `ours` (that is, belongs to routed experts), itself or as a view.
bool is_expert_tensor(const ggml::Tensor * tensor, const ggml::BufferType * ours);

// Whether the hook takes this node: it is computed from experts' tensors and from nothing that is not itself
// taken, but for the rows and ids that enter at a MUL_MAT_ID; or it belongs to the tail in one of `sum_layers`.
bool is_taken(const ggml::Tensor * node, const ggml::BufferType * ours, const SumLayers & sum_layers);

// The sub-graph's output node: the last one that computes; nullptr when there is none.
ggml::Tensor * output_of(ggml::Graph * graph);

// Fills `capture`; reuses its memory. False, with `fault` set, for a sub-graph that is not one expert
// program.
bool capture_program(ggml::Graph * graph, const ggml::BufferType * ours, Capture & capture);

} // namespace kvasir
