// Capture by ancestry: starting from the sub-graph's output, follow operands down to experts' tensors, to the
// one row input and to the one id input. No architecture's name and no node's name is looked at; only
// experts' tensors are known by name ("blk.3.ffn_up_exps.weight"), which says layer and part.
//
// ggml spells a per-expert scale as GET_ROWS(REPEAT(RESHAPE(scale)), ids); the program says it in one step.
#include "capture.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace kvasir {

using namespace ggml;

namespace {

constexpr int kDepthMax = 32;

bool is_view(const Tensor * tensor) { return tensor->op == OP_VIEW || tensor->op == OP_RESHAPE; }

bool taken(const Tensor * node, const BufferType * ours, int depth) {
    if (node == nullptr || depth > kDepthMax) {
        return false;
    }
    switch (node->op) {
        case OP_NONE: return is_expert_tensor(node, ours);
        case OP_VIEW:
        case OP_RESHAPE: return is_expert_tensor(node, ours) || taken(node->src[0], ours, depth + 1);
        case OP_MUL_MAT_ID: return is_expert_tensor(node->src[0], ours);
        case OP_ADD_ID: return is_expert_tensor(node->src[1], ours) && taken(node->src[0], ours, depth + 1);
        case OP_REPEAT:
        case OP_GET_ROWS:
        case OP_UNARY:
        case OP_SQR:
        case OP_CLAMP:
        case OP_SCALE: return taken(node->src[0], ours, depth + 1);
        case OP_GLU:
            return taken(node->src[0], ours, depth + 1) &&
                   (node->src[1] == nullptr || taken(node->src[1], ours, depth + 1));
        case OP_MUL: return taken(node->src[0], ours, depth + 1) && taken(node->src[1], ours, depth + 1);
        default: return false;
    }
}

bool starts_with(const char *& text, const char * prefix) {
    const size_t length = std::strlen(prefix);
    if (std::strncmp(text, prefix, length) != 0) {
        return false;
    }
    text += length;
    return true;
}

// "blk.<layer>.ffn_<part>_exps.<kind>" -> layer and tensor code.
bool parse_expert_name(const char * name, int & layer, int & code) {
    if (!starts_with(name, "blk.") || *name < '0' || *name > '9') {
        return false;
    }
    layer = 0;
    for (; *name >= '0' && *name <= '9'; ++name) {
        layer = layer * 10 + (*name - '0');
        if (layer > 1 << 20) {
            return false;
        }
    }
    if (!starts_with(name, ".ffn_")) {
        return false;
    }
    int part;
    if (starts_with(name, "gate_up_exps.")) {
        part = KVASIR_PART_GATE_UP;
    } else if (starts_with(name, "gate_exps.")) {
        part = KVASIR_PART_GATE;
    } else if (starts_with(name, "up_exps.")) {
        part = KVASIR_PART_UP;
    } else if (starts_with(name, "down_exps.")) {
        part = KVASIR_PART_DOWN;
    } else {
        return false;
    }
    int kind;
    if (std::strcmp(name, "weight") == 0) {
        kind = KVASIR_KIND_WEIGHT;
    } else if (std::strcmp(name, "scale") == 0) {
        kind = KVASIR_KIND_SCALE;
    } else if (std::strcmp(name, "bias") == 0) {
        kind = KVASIR_KIND_BIAS;
    } else {
        return false;
    }
    code = tensor_code(part, kind);
    return true;
}

// The layer whose experts' rows a value is, when nothing but row by row steps lie between it and their `down`
// product; -1 otherwise. Before that product a factor from outside is no router's weight.
int layer_of_rows(const Tensor * node) {
    for (int depth = 0; node != nullptr && depth <= kDepthMax; ++depth, node = node->src[0]) {
        int layer, code;
        switch (node->op) {
            case OP_MUL_MAT_ID:
                return node->src[0] != nullptr && parse_expert_name(node->src[0]->name, layer, code) &&
                               code == tensor_code(KVASIR_PART_DOWN, KVASIR_KIND_WEIGHT)
                           ? layer
                           : -1;
            case OP_VIEW:
            case OP_RESHAPE:
            case OP_ADD_ID:
            case OP_MUL: break;
            default: return -1;
        }
    }
    return -1;
}

// Sums are worth it, and their nodes few enough, for this many slots.
constexpr int64_t kSummedSlotsMin = 2;
constexpr int64_t kSummedSlotsMax = 32;

// Whether `node` is experts' rows times weights from outside, one for each row.
bool is_weighted(const Tensor * node, const BufferType * ours) {
    if (node == nullptr || node->op != OP_MUL || node->view_src != nullptr || node->type != TYPE_F32) {
        return false;
    }
    const Tensor * rows    = node->src[0];
    const Tensor * weights = node->src[1];
    return rows != nullptr && weights != nullptr && weights->type == TYPE_F32 && weights->ne[0] == 1 &&
           weights->ne[1] == rows->ne[1] && weights->ne[2] == rows->ne[2] && weights->ne[3] == 1 &&
           rows->ne[3] == 1 && rows->ne[1] >= kSummedSlotsMin && rows->ne[1] <= kSummedSlotsMax &&
           taken(rows, ours, 0) && !taken(weights, ours, 0);
}

// The slot that `node` is a view of, all tokens of it, in a weighted value; -1 when it is no such view.
int64_t slot_of_view(const Tensor * node, const BufferType * ours) {
    const Tensor * base = node->src[0];
    if (node->op != OP_VIEW || base == nullptr || node->view_src != base || node->ne[0] != base->ne[0] ||
        node->ne[1] != base->ne[2] || node->ne[2] != 1 || node->ne[3] != 1 || node->nb[0] != base->nb[0] ||
        node->nb[1] != base->nb[2] || node->view_offs % base->nb[1] != 0 || !is_weighted(base, ours)) {
        return -1;
    }
    const int64_t slot = static_cast<int64_t>(node->view_offs / base->nb[1]);
    return slot < base->ne[1] ? slot : -1;
}

// The tail that ends with `node`; without `weighted` when it is not the end of one.
Tail tail_at(const Tensor * node, const BufferType * ours) {
    if (is_weighted(node, ours)) {
        return {node, 0};
    }
    const Tensor * weighted = nullptr;
    int64_t expected        = -1; // slot that must be added next, going down
    for (int64_t i = 0; node != nullptr && i < kSummedSlotsMax; ++i) {
        const bool is_sum      = node->op == OP_ADD && node->view_src == nullptr;
        const Tensor * summand = is_sum ? node->src[1] : node;
        const int64_t slot     = summand == nullptr ? -1 : slot_of_view(summand, ours);
        if (slot < 0 || (weighted != nullptr && (summand->src[0] != weighted || slot != expected))) {
            return {};
        }
        if (weighted == nullptr) {
            weighted = summand->src[0];
            expected = slot;
        }
        if (!is_sum) {
            return slot == 0 ? Tail{weighted, i + 1} : Tail{};
        }
        --expected;
        node = node->src[0];
    }
    return {};
}

bool is_in_tail(const Tensor * node, const BufferType * ours, const SumLayers & sum_layers) {
    const Tensor * weighted = node->op == OP_VIEW ? (slot_of_view(node, ours) < 0 ? nullptr : node->src[0])
                                                  : tail_at(node, ours).weighted;
    const int layer         = weighted == nullptr ? -1 : layer_of_rows(weighted->src[0]);
    return layer >= 0 && static_cast<size_t>(layer) < sum_layers.size() &&
           sum_layers[static_cast<size_t>(layer)];
}

class Walk {
  public:
    Walk(Graph * graph, const BufferType * ours, Capture & capture) : ours_(ours), capture_(capture) {
        const int n = lib.ggml_graph_n_nodes(graph);
        for (int i = 0; i < n; ++i) {
            Tensor * node = lib.ggml_graph_node(graph, i);
            if (!is_view(node)) {
                if (n_nodes_ == kNodesMax) {
                    n_nodes_ = kNodesMax + 1;
                    return;
                }
                nodes_[n_nodes_++] = node;
            }
        }
    }

    bool run() {
        if (n_nodes_ == 0 || n_nodes_ > kNodesMax) {
            return fail("it has %d computing nodes", n_nodes_);
        }
        Tensor * out        = nodes_[n_nodes_ - 1];
        const Tensor * rows = out;
        capture_.out        = out;
        capture_.tail       = tail_at(out, ours_);
        if (capture_.tail.weighted != nullptr) {
            if (!take_tail(out)) {
                return false;
            }
            rows = capture_.tail.rows();
        }
        capture_.n_slots  = n_slots_  = rows->ne[1];
        capture_.n_tokens = n_tokens_ = rows->ne[2];
        if (value_of(rows, 0) < 0) {
            return false;
        }
        if (n_consumed_ != n_nodes_) {
            return fail("%d of its %d nodes do not lead to its output", n_nodes_ - n_consumed_, n_nodes_);
        }
        if (capture_.x == nullptr || capture_.ids == nullptr) {
            return fail("it takes no rows");
        }
        const size_t row    = static_cast<size_t>(out->ne[0]) * sizeof(float);
        const bool is_added = capture_.tail.n_summed != 0;
        if (out->type != TYPE_F32 || out->nb[0] != sizeof(float) || out->nb[1] != row ||
            out->nb[2] != row * static_cast<size_t>(is_added ? n_tokens_ : n_slots_) || out->ne[3] != 1 ||
            out->data == nullptr) {
            return fail("its output is not contiguous F32 rows");
        }
        capture_.program.input_per_slot = capture_.x->ne[1] != 1;
        const char * fault =
            program_fault(capture_.program.steps.data(), static_cast<int>(capture_.program.steps.size()));
        return fault == nullptr || fail("%s", fault);
    }

  private:
    static constexpr int kNodesMax = 96;

    const BufferType * ours_;
    Capture & capture_;
    Tensor * nodes_[kNodesMax];
    int n_nodes_      = 0;
    int n_consumed_   = 0;
    int64_t n_slots_  = 0;
    int64_t n_tokens_ = 0;
    const Tensor * known_[KVASIR_PROGRAM_STEPS_MAX]; // the tensor each step stands for

    bool fail(const char * format, ...) __attribute__((format(printf, 2, 3))) {
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(capture_.fault, sizeof capture_.fault, format, arguments);
        va_end(arguments);
        return false;
    }

    bool in_graph(const Tensor * tensor) const {
        for (int i = 0; i < n_nodes_; ++i) {
            if (nodes_[i] == tensor) {
                return true;
            }
        }
        return false;
    }

    // Counts the nodes of the tail that ends with `node`: the hook evaluates all of it or nothing.
    bool take_tail(const Tensor * node) {
        for (; node->op == OP_ADD; node = node->src[0]) {
            if (!in_graph(node)) {
                return fail("it adds to what was added up elsewhere");
            }
            ++n_consumed_;
        }
        if (!in_graph(capture_.tail.weighted) || capture_.tail.weights()->data == nullptr) {
            return fail("it adds up what was weighted elsewhere");
        }
        ++n_consumed_;
        return true;
    }

    // Whether the sub-graph itself computes this value (directly, or as a view of something it computes).
    bool is_inner(const Tensor * tensor) const {
        return in_graph(tensor->view_src != nullptr ? tensor->view_src : tensor);
    }

    // The tensor code of one of our tensors, or -1. The first one decides the layer, all others must agree.
    int expert_tensor(const Tensor * tensor) {
        int layer = -1;
        int code  = -1;
        if (tensor == nullptr || !is_expert_tensor(tensor, ours_) ||
            !parse_expert_name(tensor->name, layer, code)) {
            fail("%.40s is not a routed expert's tensor", tensor ? tensor->name : "nothing");
            return -1;
        }
        if (capture_.layer == -1) {
            capture_.layer = layer;
        } else if (capture_.layer != layer) {
            fail("it mixes layers %d and %d", capture_.layer, layer);
            return -1;
        }
        return code;
    }

    bool take_ids(const Tensor * ids) {
        if (ids == nullptr || ids->type != TYPE_I32 || ids->ne[0] != n_slots_ || ids->ne[1] != n_tokens_ ||
            ids->ne[2] != 1 || ids->ne[3] != 1 || ids->nb[0] != sizeof(int32_t) || ids->data == nullptr) {
            return fail("its expert ids are not [slots, tokens]");
        }
        if (capture_.ids == nullptr) {
            capture_.ids = ids;
        } else if (capture_.ids->data != ids->data || capture_.ids->nb[1] != ids->nb[1]) {
            return fail("it has two sets of expert ids");
        }
        return true;
    }

    bool take_x(const Tensor * x) {
        if (x->type != TYPE_F32 || x->nb[0] != sizeof(float) || x->ne[2] != n_tokens_ || x->ne[3] != 1 ||
            (x->ne[1] != 1 && x->ne[1] != n_slots_) || x->data == nullptr) {
            return fail("its input is not F32 rows");
        }
        if (capture_.x == nullptr) {
            capture_.x = x;
        } else if (capture_.x->data != x->data || capture_.x->ne[0] != x->ne[0] ||
                   capture_.x->ne[1] != x->ne[1] || capture_.x->nb[1] != x->nb[1] ||
                   capture_.x->nb[2] != x->nb[2]) {
            return fail("it has two inputs");
        }
        return true;
    }

    int push(const Tensor * tensor, int op, int input_a, int input_b, int code, const int32_t * params,
             int n_params) {
        std::vector<kvasir_program_step> & steps = capture_.program.steps;
        if (steps.size() == KVASIR_PROGRAM_STEPS_MAX) {
            fail("it has more than %d steps", KVASIR_PROGRAM_STEPS_MAX);
            return -1;
        }
        kvasir_program_step step = {op, input_a, input_b, code, {0, 0, 0, 0}};
        for (int i = 0; i < n_params; ++i) {
            step.params[i] = params[i];
        }
        known_[steps.size()] = tensor;
        steps.push_back(step);
        return static_cast<int>(steps.size());
    }

    // The value (step number, from 1) that stands for `tensor`, made now if need be; -1 after a fault.
    int value_of(const Tensor * tensor, int depth) {
        if (tensor == nullptr || depth > kDepthMax) {
            fail("it is too deep");
            return -1;
        }
        for (size_t i = 0; i < capture_.program.steps.size(); ++i) {
            if (known_[i] == tensor) {
                return static_cast<int>(i) + 1;
            }
        }
        if (tensor->op == OP_VIEW) {
            return slice(tensor, depth);
        }
        if (tensor->op == OP_RESHAPE) {
            const Tensor * source = tensor->src[0];
            if (source == nullptr || std::memcmp(source->ne, tensor->ne, sizeof source->ne) != 0) {
                fail("it reshapes an activation");
                return -1;
            }
            return value_of(source, depth + 1);
        }
        if (!in_graph(tensor)) {
            fail("it takes %s of %.40s from outside", lib.ggml_op_name(tensor->op), tensor->name);
            return -1;
        }
        if (tensor->view_src != nullptr) { // then a value would change under those who read it later
            fail("it computes %s in place", lib.ggml_op_name(tensor->op));
            return -1;
        }
        ++n_consumed_;
        return compute(tensor, depth);
    }

    int compute(const Tensor * t, int depth) {
        switch (t->op) {
            case OP_MUL_MAT_ID: {
                const int code = expert_tensor(t->src[0]);
                if (code < 0 || t->src[1] == nullptr || !take_ids(t->src[2])) {
                    return -1;
                }
                int input = 0;
                if (is_inner(t->src[1])) {
                    input = value_of(t->src[1], depth + 1);
                } else if (!take_x(t->src[1])) {
                    return -1;
                }
                return input < 0 ? -1
                                 : push(t, KVASIR_OP_EXPERT_MATMUL, input, KVASIR_VALUE_ABSENT, code,
                                        t->op_params, 4);
            }
            case OP_ADD_ID: {
                const int code = expert_tensor(t->src[1]);
                if (code < 0 || !take_ids(t->src[2])) {
                    return -1;
                }
                const int input = value_of(t->src[0], depth + 1);
                return input < 0
                           ? -1
                           : push(t, KVASIR_OP_EXPERT_ADD, input, KVASIR_VALUE_ABSENT, code, nullptr, 0);
            }
            case OP_GET_ROWS: return expert_scale(t);
            case OP_GLU: {
                const int a = value_of(t->src[0], depth + 1);
                const int b = a >= 0 && t->src[1] ? value_of(t->src[1], depth + 1) : KVASIR_VALUE_ABSENT;
                if (a < 0 || (t->src[1] && b < 0)) {
                    return -1;
                }
                return push(t, KVASIR_OP_GLU, a, b, -1, t->op_params, 4);
            }
            case OP_UNARY: return elementwise(t, KVASIR_OP_UNARY, 1, depth);
            case OP_SQR: return elementwise(t, KVASIR_OP_SQUARE, 0, depth);
            case OP_CLAMP: return elementwise(t, KVASIR_OP_CLAMP, 2, depth);
            case OP_SCALE: return elementwise(t, KVASIR_OP_LINEAR, 2, depth);
            case OP_MUL: {
                const int a = value_of(t->src[0], depth + 1);
                const int b = a < 0 ? -1 : value_of(t->src[1], depth + 1);
                return b < 0 ? -1 : push(t, KVASIR_OP_MULTIPLY, a, b, -1, nullptr, 0);
            }
            default: fail("it computes %s", lib.ggml_op_name(t->op)); return -1;
        }
    }

    int elementwise(const Tensor * t, int op, int n_params, int depth) {
        const int input = value_of(t->src[0], depth + 1);
        return input < 0 ? -1 : push(t, op, input, KVASIR_VALUE_ABSENT, -1, t->op_params, n_params);
    }

    // A range of elements of each row of something the sub-graph computed.
    int slice(const Tensor * t, int depth) {
        const Tensor * base = t->view_src;
        if (base == nullptr || t->ne[1] != base->ne[1] || t->ne[2] != base->ne[2] ||
            t->ne[3] != base->ne[3] || t->nb[0] != base->nb[0] || t->nb[1] != base->nb[1] ||
            t->nb[2] != base->nb[2] || t->view_offs % sizeof(float) != 0) {
            fail("it views an activation across rows");
            return -1;
        }
        const Tensor * source = t->src[0]; // a view also knows its root: no other value may lie between
        while (source != nullptr && is_view(source)) {
            source = source->src[0];
        }
        if (source != base) {
            fail("it views a value that was changed in place");
            return -1;
        }
        const size_t first = t->view_offs / sizeof(float);
        if (first + static_cast<size_t>(t->ne[0]) > static_cast<size_t>(base->ne[0])) {
            fail("it views an activation across rows");
            return -1;
        }
        const int input         = value_of(base, depth + 1);
        const int32_t params[2] = {static_cast<int32_t>(first), static_cast<int32_t>(t->ne[0])};
        return input < 0 ? -1 : push(t, KVASIR_OP_SLICE, input, KVASIR_VALUE_ABSENT, -1, params, 2);
    }

    // GET_ROWS of a scale [n_expert], reshaped to [1, n_expert, 1] and repeated over the tokens.
    int expert_scale(const Tensor * t) {
        if (!take_ids(t->src[1])) {
            return -1;
        }
        const Tensor * source = t->src[0];
        while (source != nullptr && (source->op == OP_REPEAT || source->op == OP_RESHAPE)) {
            if (source->op == OP_REPEAT) {
                if (!in_graph(source)) {
                    fail("it repeats something from outside");
                    return -1;
                }
                ++n_consumed_;
            }
            source = source->src[0];
        }
        const int code = expert_tensor(source);
        if (code < 0) {
            return -1;
        }
        const Tensor * table = t->src[0];
        if (tensor_kind(code) != KVASIR_KIND_SCALE || source->type != TYPE_F32 || source->ne[1] != 1 ||
            table->ne[0] != 1 || table->ne[1] != source->ne[0] || table->ne[2] != n_tokens_) {
            fail("it gathers rows of something that is not a per-expert scale");
            return -1;
        }
        return push(t, KVASIR_OP_EXPERT_SCALE, KVASIR_VALUE_ABSENT, KVASIR_VALUE_ABSENT, code, nullptr, 0);
    }
};

} // namespace

bool is_expert_tensor(const Tensor * tensor, const BufferType * ours) {
    const Buffer * buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
    return buffer != nullptr && buffer->buft == ours;
}

bool is_taken(const Tensor * node, const BufferType * ours, const SumLayers & sum_layers) {
    return taken(node, ours, 0) || (!sum_layers.empty() && is_in_tail(node, ours, sum_layers));
}

Tensor * output_of(Graph * graph) {
    for (int i = lib.ggml_graph_n_nodes(graph) - 1; i >= 0; --i) {
        Tensor * node = lib.ggml_graph_node(graph, i);
        if (!is_view(node)) {
            return node;
        }
    }
    return nullptr;
}

bool capture_program(Graph * graph, const BufferType * ours, Capture & capture) {
    capture.layer = -1;
    capture.program.steps.clear();
    capture.tail     = {};
    capture.x        = nullptr;
    capture.ids      = nullptr;
    capture.out      = nullptr;
    capture.fault[0] = '\0';
    return Walk(graph, ours, capture).run();
}

} // namespace kvasir
