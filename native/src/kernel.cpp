// The expert kernel: runs an expert program on gathered rows with ggml's CPU backend, or on another device.
//
// Weights live in ggml buffers, one tensor a (layer, part), with only the held experts, renumbered. A call
// checks everything, lays the program's values out in one scratch area (registers, assigned once a program),
// builds a graph of at most a few dozen nodes in a fixed arena and computes it. Building costs 2-3 us, so
// graphs are not cached. Results of a row do not depend on which other rows share the call, except that
// ggml's tiled K-quant kernels take over at 8 rows *of one expert*: all of an expert's rows of one ubatch
// must therefore be in one call for results to be those of an undivided run.
//
// A device has memory of its own: there everything is placed in its buffers, rows and ids are copied in and
// results out, and each operation is first asked of it, because what a device cannot compute ends the process.
#include "ggml_abi.h"
#include "program.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

using namespace ggml;

namespace {

constexpr int kThreadsMax   = KVASIR_KERNEL_THREADS_MAX;
constexpr int kExpertsMax   = 1 << 16;
constexpr int kLayersMax    = 1 << 16;
constexpr int kProgramsMax  = 1 << 12;
constexpr int kRegistersMax = 8;
constexpr int64_t kWidthMax = 1 << 24;
constexpr size_t kAlignment = 64;

struct FreeAligned {
    void operator()(void * memory) const { std::free(memory); }
};

struct FreeContext {
    void operator()(Context * context) const { lib.ggml_free(context); }
};

struct FreeBuffer {
    void operator()(Buffer * buffer) const { lib.ggml_backend_buffer_free(buffer); }
};

using ContextPointer = std::unique_ptr<Context, FreeContext>;
using BufferPointer  = std::unique_ptr<Buffer, FreeBuffer>;

// Uninitialised aligned bytes that only grow.
class Scratch {
  public:
    // nullptr without memory.
    unsigned char * reserve(size_t size) {
        if (size > size_) {
            const size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
            memory_.reset(std::aligned_alloc(kAlignment, rounded));
            size_ = memory_ ? rounded : 0;
        }
        return static_cast<unsigned char *>(memory_.get());
    }

  private:
    std::unique_ptr<void, FreeAligned> memory_;
    size_t size_ = 0;
};

struct HeldTensor {
    Tensor * tensor = nullptr;
    BufferPointer buffer;
    size_t expert_size = 0;
    std::vector<bool> set;
    int32_t n_set = 0;
};

// Asks for huge pages under a buffer that nobody has written to yet. Experts are read once a token, in an
// order that no cache foresees: with small pages a tenth of the time goes into address translation.
void prefer_huge_pages(void * base, size_t size) {
#if defined(MADV_HUGEPAGE)
    constexpr size_t kWorthIt = static_cast<size_t>(4) << 20;
    if (size >= kWorthIt) {
        const size_t page  = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t begin = (reinterpret_cast<size_t>(base) + page - 1) / page * page;
        const size_t end   = (reinterpret_cast<size_t>(base) + size) / page * page;
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE); // a refusal changes nothing
    }
#else
    (void)base;
    (void)size;
#endif
}

// Whether a device multiplies rows by weights of this shape, and the bytes that these take there.
bool device_can_multiply(Device * device, BufferType * memory, int type, const int64_t * shape, int64_t n_held,
                         size_t & size) {
    alignas(64) unsigned char arena[4096];
    const ContextPointer context(lib.ggml_init({sizeof arena, arena, true}));
    if (!context) {
        return false;
    }
    Tensor * weights = lib.ggml_new_tensor_3d(context.get(), type, shape[0], shape[1], n_held);
    Tensor * rows    = lib.ggml_new_tensor_3d(context.get(), TYPE_F32, shape[0], 1, 1);
    Tensor * ids     = lib.ggml_new_tensor_2d(context.get(), TYPE_I32, 1, 1);
    size             = lib.ggml_backend_buft_get_alloc_size(memory, weights);
    return lib.ggml_backend_dev_supports_op(device, lib.ggml_mul_mat_id(context.get(), weights, rows, ids));
}

// A program fitted to a layer: the width of each value, and the register it lives in.
struct Binding {
    bool fits = false;
    char fault[128];
    int64_t width[KVASIR_PROGRAM_STEPS_MAX + 1];
    int reg[KVASIR_PROGRAM_STEPS_MAX + 1]; // -1: no memory of its own (the input, a slice, the output)
    int64_t reg_width[kRegistersMax];
    int n_regs = 0;
};

struct Layer {
    std::vector<int32_t> local_of_expert; // -1 where not held
    int32_t n_held = 0;
    ContextPointer context;
    HeldTensor tensors[KVASIR_TENSOR_COUNT];
    std::map<int32_t, std::unique_ptr<Binding>> bindings;
};

struct Fault {
    char text[192] = "";

    int32_t say(int32_t status, const char * format, ...) __attribute__((format(printf, 3, 4))) {
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        return status;
    }
};

const char * kKindNames[] = {"weight", "scale", "bias"};
const char * kPartNames[] = {"gate", "up", "down", "gate_up"};

// Whether rows of `width` weights can be of this type at all.
bool has_blocks(int type, int64_t width) {
    return type >= 0 && type < kTypeCount && lib.ggml_type_size(type) != 0 && lib.ggml_blck_size(type) > 0 &&
           width % lib.ggml_blck_size(type) == 0;
}

// Whether ggml's CPU backend can multiply rows of `width` floats by weights of this type.
bool can_multiply(int type, int64_t width) {
    if (!has_blocks(type, width)) {
        return false;
    }
    const TypeTraitsCpu * traits = lib.ggml_get_type_traits_cpu(type);
    if (traits->vec_dot == nullptr) {
        return false;
    }
    const TypeTraitsCpu * rows = lib.ggml_get_type_traits_cpu(traits->vec_dot_type);
    return rows->from_float != nullptr && width % lib.ggml_blck_size(traits->vec_dot_type) == 0;
}

// Fills widths, or says why the program does not fit.
bool bind_widths(const kvasir::Program & program, const Layer & layer, Binding & binding) {
    auto unfit = [&](size_t i, const char * reason) {
        std::snprintf(binding.fault, sizeof binding.fault, "step %zu: %s", i + 1, reason);
        return false;
    };
    int64_t * width = binding.width;
    width[0]        = -1; // the first matmul decides
    for (size_t i = 0; i < program.steps.size(); ++i) {
        const kvasir_program_step & step = program.steps[i];
        const HeldTensor * held          = step.tensor >= 0 ? &layer.tensors[step.tensor] : nullptr;
        if (held != nullptr && held->tensor == nullptr) {
            return unfit(i, "the layer has no such tensor");
        }
        if (held != nullptr && held->n_set != layer.n_held) {
            return unfit(i, "some experts of the layer are not loaded");
        }
        const int64_t a  = step.input_a >= 0 ? width[step.input_a] : 0;
        const int64_t b  = step.input_b >= 0 ? width[step.input_b] : 0;
        int64_t & result = width[i + 1];
        switch (step.op) {
            case KVASIR_OP_EXPERT_MATMUL:
                if (step.input_a == 0 && a < 0) {
                    width[0] = held->tensor->ne[0];
                } else if (a != held->tensor->ne[0]) {
                    return unfit(i, "the row is not as wide as the weights");
                }
                result = held->tensor->ne[1];
                break;
            case KVASIR_OP_EXPERT_ADD:
                if (a != held->tensor->ne[0]) {
                    return unfit(i, "the row is not as wide as the bias");
                }
                result = a;
                break;
            case KVASIR_OP_EXPERT_SCALE: result = 1; break;
            case KVASIR_OP_GLU:
                if (step.input_b >= 0 ? a != b : a % 2 != 0) {
                    return unfit(i, "gate and up differ in width");
                }
                result = step.input_b >= 0 ? a : a / 2;
                break;
            case KVASIR_OP_MULTIPLY:
                if (b != a && b != 1) {
                    return unfit(i, "the factors differ in width");
                }
                result = a;
                break;
            case KVASIR_OP_SLICE:
                if (step.params[0] > a || step.params[1] > a - step.params[0]) {
                    return unfit(i, "the slice reaches past the row");
                }
                result = step.params[1];
                break;
            default: result = a; break;
        }
    }
    return true;
}

// Gives each value a register that no other living value has; false when it would take too many (a program
// that wants that much memory is not one that llama.cpp built). Nothing is computed in place.
bool assign_registers(const kvasir::Program & program, Binding & binding) {
    const int n = static_cast<int>(program.steps.size());
    int last_use[KVASIR_PROGRAM_STEPS_MAX + 1];
    for (int value = 0; value <= n; ++value) {
        last_use[value] = value;
    }
    for (int i = n - 1; i >= 0; --i) { // backwards, so that a slice keeps what it is cut from alive
        const kvasir_program_step & step = program.steps[i];
        const int end                    = step.op == KVASIR_OP_SLICE ? last_use[i + 1] : i + 1;
        for (const int input : {step.input_a, step.input_b}) {
            if (input >= 0) {
                last_use[input] = std::max(last_use[input], end);
            }
        }
    }
    int busy_until[kRegistersMax];
    binding.reg[0] = -1;
    for (int value = 1; value <= n; ++value) {
        if (value == n || program.steps[value - 1].op == KVASIR_OP_SLICE) {
            binding.reg[value] = -1;
            continue;
        }
        int reg = 0;
        while (reg < binding.n_regs && busy_until[reg] >= value) {
            ++reg;
        }
        if (reg == kRegistersMax) {
            std::snprintf(binding.fault, sizeof binding.fault, "more than %d values live at once",
                          kRegistersMax);
            return false;
        }
        if (reg == binding.n_regs) {
            binding.reg_width[binding.n_regs++] = 0;
        }
        busy_until[reg]        = last_use[value];
        binding.reg[value]     = reg;
        binding.reg_width[reg] = std::max(binding.reg_width[reg], binding.width[value]);
    }
    return true;
}

} // namespace

struct kvasir_kernel {
    int32_t n_expert    = 0;
    Backend * backend   = nullptr;
    ThreadPool * pool   = nullptr;
    Device * device     = nullptr; // where everything lies in the memory of a device; else rows stay where they are
    BufferType * memory = nullptr; // of weights, and on a device of everything
    bool is_processor   = true;
    std::mutex mutex;
    std::map<int32_t, std::unique_ptr<Layer>> layers;
    std::map<int32_t, kvasir::Program> programs;
    Scratch arena;
    Scratch values;
    BufferPointer area; // a device's: values, rows, ids and results of a call
    std::vector<int32_t> ids;
    int64_t memory_bytes = 0;
    Fault fault;

    ~kvasir_kernel() {
        area.reset();
        layers.clear(); // buffers go before their backend does
        if (backend != nullptr) {
            lib.ggml_backend_free(backend);
        }
        if (pool != nullptr) {
            lib.ggml_threadpool_free(pool);
        }
    }

    Layer * layer_of(int32_t number) {
        const auto found = layers.find(number);
        return found == layers.end() ? nullptr : found->second.get();
    }

    int32_t bind(int32_t layer_number, int32_t index, Layer *& layer, const kvasir::Program *& program,
                 const Binding *& binding);
    unsigned char * reserve_area(size_t size);
    bool place(Tensor * tensor, unsigned char * address, const unsigned char * end);
    int32_t check_pairs(const Layer & layer, int32_t n_rows, int32_t n_pairs, const int32_t * row_of_pair,
                        const int32_t * expert_of_pair);
    int32_t compute(const Layer & layer, const kvasir::Program & program, const Binding & binding,
                    int32_t n_rows, int32_t n_pairs, const float * x, const int32_t * row_of_pair,
                    float * out);
};

int32_t kvasir_kernel::bind(int32_t layer_number, int32_t index, Layer *& layer,
                            const kvasir::Program *& program, const Binding *& binding) {
    layer = layer_of(layer_number);
    if (layer == nullptr) {
        return fault.say(KVASIR_KERNEL_UNKNOWN_LAYER, "no expert of layer %d is held", layer_number);
    }
    const auto found = programs.find(index);
    if (found == programs.end()) {
        return fault.say(KVASIR_KERNEL_UNKNOWN_PROGRAM, "program %d is not known", index);
    }
    program                         = &found->second;
    std::unique_ptr<Binding> & slot = layer->bindings[index];
    if (!slot) {
        slot       = std::make_unique<Binding>();
        slot->fits = bind_widths(*program, *layer, *slot) && assign_registers(*program, *slot);
    }
    if (!slot->fits) {
        return fault.say(KVASIR_KERNEL_PROGRAM_UNFIT, "program %d does not fit layer %d: %s", index,
                         layer_number, slot->fault);
    }
    binding = slot.get();
    return KVASIR_KERNEL_DONE;
}

// Fills `ids` with the held experts' local numbers.
int32_t kvasir_kernel::check_pairs(const Layer & layer, int32_t n_rows, int32_t n_pairs,
                                   const int32_t * row_of_pair, const int32_t * expert_of_pair) {
    if (n_rows < 1 || n_pairs < 1 || n_pairs > KVASIR_KERNEL_PAIRS_MAX || n_rows > n_pairs) {
        return fault.say(KVASIR_KERNEL_INVALID, "%d rows in %d pairs are out of range", n_rows, n_pairs);
    }
    ids.resize(static_cast<size_t>(n_pairs));
    for (int32_t i = 0; i < n_pairs; ++i) {
        if (row_of_pair[i] < 0 || row_of_pair[i] >= n_rows) {
            return fault.say(KVASIR_KERNEL_ROW_OUT_OF_RANGE, "pair %d names row %d of %d", i, row_of_pair[i],
                             n_rows);
        }
        const int32_t expert = expert_of_pair[i];
        const int32_t local  = expert >= 0 && expert < n_expert ? layer.local_of_expert[expert] : -1;
        if (local < 0) {
            return fault.say(KVASIR_KERNEL_FOREIGN_EXPERT, "expert %d is not held", expert);
        }
        ids[i] = local;
    }
    return KVASIR_KERNEL_DONE;
}

// A device's memory of at least so many bytes; nullptr without.
unsigned char * kvasir_kernel::reserve_area(size_t size) {
    if (!area || lib.ggml_backend_buffer_get_size(area.get()) < size) {
        area.reset(); // first, so that both are never held
        area.reset(lib.ggml_backend_buft_alloc_buffer(memory, size));
        if (!area) {
            return nullptr;
        }
        lib.ggml_backend_buffer_set_usage(area.get(), USAGE_COMPUTE);
    }
    return static_cast<unsigned char *>(lib.ggml_backend_buffer_get_base(area.get()));
}

// Puts a tensor at an address: a device's, or memory of ours. False where it would reach past `end`.
bool kvasir_kernel::place(Tensor * tensor, unsigned char * address, const unsigned char * end) {
    if (device == nullptr) {
        tensor->data = address;
        return true;
    }
    return lib.ggml_backend_buft_get_alloc_size(memory, tensor) <= static_cast<size_t>(end - address) &&
           lib.ggml_backend_tensor_alloc(area.get(), tensor, address) == STATUS_SUCCESS;
}

int32_t kvasir_kernel::compute(const Layer & layer, const kvasir::Program & program, const Binding & binding,
                               int32_t n_rows, int32_t n_pairs, const float * x, const int32_t * row_of_pair,
                               float * out) {
    // Rows with equally many pairs each, in order: rows need no gathering and are quantised once.
    bool uniform    = n_pairs % n_rows == 0;
    int32_t n_slots = n_pairs / n_rows;
    for (int32_t i = 0; uniform && i < n_pairs; ++i) {
        uniform = row_of_pair[i] == i / n_slots;
    }
    if (!uniform) {
        n_slots = 1;
    }
    const int32_t n_tokens = n_pairs / n_slots;

    // One area: the rows that are not read where they are, then the registers; on a device ids and results too.
    const size_t alignment =
        device ? std::max(kAlignment, lib.ggml_backend_buft_get_alignment(memory)) : kAlignment;
    const auto bytes_of = [alignment](int64_t width, int32_t rows) {
        const size_t size = static_cast<size_t>(width) * static_cast<size_t>(rows) * sizeof(float);
        return (size + alignment - 1) / alignment * alignment;
    };
    const int64_t width_in   = binding.width[0];
    const int64_t width_out  = binding.width[program.steps.size()];
    const int32_t n_gathered = uniform ? 0 : n_pairs;
    const size_t gathered    = bytes_of(width_in, n_gathered);
    size_t total             = device ? bytes_of(width_in, n_tokens) : gathered;
    size_t offset_of_reg[kRegistersMax];
    for (int reg = 0; reg < binding.n_regs; ++reg) {
        offset_of_reg[reg] = total;
        total += bytes_of(binding.reg_width[reg], n_pairs);
    }
    const size_t offset_of_ids = total;
    const size_t offset_of_out = offset_of_ids + (device ? bytes_of(1, n_pairs) : 0);
    total                      = offset_of_out + (device ? bytes_of(width_out, n_pairs) : 0);
    unsigned char * gather     = values.reserve(std::max<size_t>(device ? gathered : total, kAlignment));
    unsigned char * area_base  = device ? reserve_area(total) : gather;
    if (gather == nullptr || area_base == nullptr) {
        return fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for %zu bytes of rows", total);
    }
    const unsigned char * area_end = area_base + total;
    if (!uniform) {
        float * to = reinterpret_cast<float *>(gather);
        for (int32_t i = 0; i < n_pairs; ++i, to += width_in) {
            std::memcpy(to, x + static_cast<size_t>(row_of_pair[i]) * static_cast<size_t>(width_in),
                        static_cast<size_t>(width_in) * sizeof(float));
        }
    }
    const float * rows = uniform ? x : reinterpret_cast<const float *>(gather);

    const size_t n_steps = program.steps.size();
    // A step is at most three nodes (an expert's scale) and one leaf. No larger than needed: a layer's
    // weights have just emptied the caches, so every line that is touched costs.
    const size_t n_nodes = 4 * n_steps + 4;
    const size_t arena_size =
        lib.ggml_tensor_overhead() * (3 * n_steps + 4) + lib.ggml_graph_overhead_custom(n_nodes, false) + 256;
    unsigned char * memory = arena.reserve(arena_size);
    if (memory == nullptr) {
        return fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for a graph");
    }
    const ContextPointer context(lib.ggml_init({arena_size, memory, true}));
    if (!context) {
        return fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for a graph");
    }
    Context * c   = context.get();
    Graph * graph = lib.ggml_new_graph_custom(c, n_nodes, false);

    const auto no_room = [&]() {
        return fault.say(KVASIR_KERNEL_COMPUTE_FAILED, "the device wants more room than tensors have");
    };
    unsigned char * ids_base =
        device ? area_base + offset_of_ids : reinterpret_cast<unsigned char *>(ids.data());
    Tensor * id_tensor = lib.ggml_new_tensor_2d(c, TYPE_I32, n_slots, n_tokens);
    Tensor * flat_ids  = nullptr; // the same ids as one row, for per-expert scales
    Tensor * value[KVASIR_PROGRAM_STEPS_MAX + 1];
    value[0] = lib.ggml_new_tensor_3d(c, TYPE_F32, width_in, 1, n_tokens);
    unsigned char * rows_base =
        device ? area_base : reinterpret_cast<unsigned char *>(const_cast<float *>(rows));
    if (!place(value[0], rows_base, area_end) || !place(id_tensor, ids_base, area_end)) {
        return no_room();
    }
    if (device) {
        lib.ggml_backend_tensor_set(value[0], rows, 0, lib.ggml_nbytes(value[0]));
        lib.ggml_backend_tensor_set(id_tensor, ids.data(), 0, lib.ggml_nbytes(id_tensor));
    }
    // A view knows where it is, but not in which buffer of a device.
    const auto viewed = [&](Tensor * view) {
        return device == nullptr || lib.ggml_backend_view_init(view) == STATUS_SUCCESS ? view : nullptr;
    };
    Tensor * last = nullptr;

    for (size_t i = 0; i < n_steps; ++i) {
        const kvasir_program_step & step = program.steps[i];
        Tensor * a                       = step.input_a >= 0 ? value[step.input_a] : nullptr;
        Tensor * b                       = step.input_b >= 0 ? value[step.input_b] : nullptr;
        Tensor * held                    = step.tensor >= 0 ? layer.tensors[step.tensor].tensor : nullptr;
        const int32_t * p                = step.params;
        float factors[2];
        std::memcpy(factors, p, sizeof factors);
        Tensor * result = nullptr; // the value
        Tensor * node   = nullptr; // what computes it, where that is another tensor
        switch (step.op) {
            case KVASIR_OP_EXPERT_MATMUL: result = lib.ggml_mul_mat_id(c, held, a, id_tensor); break;
            case KVASIR_OP_EXPERT_ADD: result = lib.ggml_add_id(c, a, held, id_tensor); break;
            case KVASIR_OP_EXPERT_SCALE:
                if (flat_ids == nullptr) {
                    flat_ids = lib.ggml_new_tensor_2d(c, TYPE_I32, n_pairs, 1);
                    if (!place(flat_ids, ids_base, area_end)) {
                        return no_room();
                    }
                }
                node = lib.ggml_get_rows(c, viewed(lib.ggml_reshape_3d(c, held, 1, layer.n_held, 1)), flat_ids);
                break;
            case KVASIR_OP_GLU:
                result = b ? lib.ggml_glu_split(c, a, b, p[0]) : lib.ggml_glu(c, a, p[0], p[1] != 0);
                break;
            case KVASIR_OP_UNARY: result = lib.ggml_unary(c, a, p[0]); break;
            case KVASIR_OP_SQUARE: result = lib.ggml_sqr(c, a); break;
            case KVASIR_OP_CLAMP: result = lib.ggml_clamp(c, a, factors[0], factors[1]); break;
            case KVASIR_OP_LINEAR: result = lib.ggml_scale_bias(c, a, factors[0], factors[1]); break;
            case KVASIR_OP_MULTIPLY: result = lib.ggml_mul(c, a, b); break;
            default:
                result = viewed(lib.ggml_view_3d(c, a, p[1], n_slots, n_tokens, a->nb[1], a->nb[2],
                                                 static_cast<size_t>(p[0]) * sizeof(float)));
                break;
        }
        if (node == nullptr) {
            node = result;
        }
        if (step.op == KVASIR_OP_EXPERT_MATMUL || step.op == KVASIR_OP_GLU) {
            std::memcpy(node->op_params, p, sizeof step.params);
        }
        if (step.op != KVASIR_OP_SLICE) {
            const int reg            = binding.reg[i + 1];
            unsigned char * out_base = device ? area_base + offset_of_out : reinterpret_cast<unsigned char *>(out);
            if (!place(node, reg >= 0 ? area_base + offset_of_reg[reg] : out_base, area_end)) {
                return no_room();
            }
            if (device != nullptr && !lib.ggml_backend_dev_supports_op(device, node)) {
                return fault.say(KVASIR_KERNEL_COMPUTE_FAILED, "step %zu: the device does not compute %s", i + 1,
                                 lib.ggml_op_name(node->op));
            }
            last = node;
        }
        if (result == nullptr) { // a row of scalars becomes one scalar a pair
            result = viewed(lib.ggml_reshape_3d(c, node, 1, n_slots, n_tokens));
        }
        value[i + 1] = result;
        lib.ggml_build_forward_expand(graph, result); // in program order: registers rely on it
    }
    if (lib.ggml_backend_graph_compute(backend, graph) != STATUS_SUCCESS) {
        return fault.say(KVASIR_KERNEL_COMPUTE_FAILED, "ggml could not compute the graph");
    }
    if (device) {
        lib.ggml_backend_tensor_get(last, out, 0, lib.ggml_nbytes(last));
    }
    return KVASIR_KERNEL_DONE;
}

extern "C" kvasir_kernel * kvasir_kernel_create(int32_t n_threads, int32_t n_expert) {
    if (!lib_bound || n_threads < 1 || n_threads > kThreadsMax || n_expert < 1 || n_expert > kExpertsMax) {
        return nullptr;
    }
    std::unique_ptr<kvasir_kernel> kernel(new (std::nothrow) kvasir_kernel{});
    if (!kernel) {
        return nullptr;
    }
    kernel->n_expert = n_expert;
    kernel->backend  = lib.ggml_backend_cpu_init();
    kernel->memory   = lib.ggml_backend_cpu_buffer_type();
    ThreadPoolParams params;
    lib.ggml_threadpool_params_init(&params, n_threads);
    params.poll  = 0; // never spin while waiting
    kernel->pool = lib.ggml_threadpool_new(&params);
    if (kernel->backend == nullptr || kernel->pool == nullptr) {
        return nullptr;
    }
    lib.ggml_backend_cpu_set_n_threads(kernel->backend, n_threads);
    lib.ggml_backend_cpu_set_threadpool(kernel->backend, kernel->pool);
    return kernel.release();
}

extern "C" kvasir_kernel * kvasir_kernel_create_on(void * device, int32_t n_threads, int32_t n_expert) {
    if (!lib_bound || device == nullptr || n_threads < 1 || n_threads > kThreadsMax || n_expert < 1 ||
        n_expert > kExpertsMax) {
        return nullptr;
    }
    std::unique_ptr<kvasir_kernel> kernel(new (std::nothrow) kvasir_kernel{});
    if (!kernel) {
        return nullptr;
    }
    kernel->n_expert = n_expert;
    kernel->device   = static_cast<Device *>(device);
    kernel->memory   = lib.ggml_backend_dev_buffer_type(kernel->device);
    kernel->backend  = lib.ggml_backend_dev_init(kernel->device, nullptr);
    if (kernel->memory == nullptr || kernel->backend == nullptr) {
        return nullptr;
    }
    kernel->is_processor = lib.ggml_backend_dev_backend_reg(kernel->device) == lib.ggml_backend_cpu_reg();
    if (kernel->is_processor) {
        lib.ggml_backend_cpu_set_n_threads(kernel->backend, n_threads);
    }
    return kernel.release();
}

extern "C" void kvasir_kernel_destroy(kvasir_kernel * kernel) { delete kernel; }

extern "C" int32_t kvasir_kernel_add_layer(kvasir_kernel * kernel, int32_t layer, const int32_t * experts,
                                           int32_t n_held) {
    const std::lock_guard<std::mutex> lock(kernel->mutex);
    Fault & fault = kernel->fault;
    if (layer < 0 || layer >= kLayersMax || kernel->layer_of(layer) != nullptr) {
        return fault.say(KVASIR_KERNEL_INVALID, "layer %d is out of range or already there", layer);
    }
    if (n_held < 1 || n_held > kernel->n_expert) {
        return fault.say(KVASIR_KERNEL_INVALID, "%d held experts are out of range", n_held);
    }
    for (int32_t i = 0; i < n_held; ++i) {
        const int32_t before = i == 0 ? -1 : experts[i - 1];
        if (experts[i] <= before || experts[i] >= kernel->n_expert) {
            return fault.say(KVASIR_KERNEL_INVALID, "expert %d is out of range or out of order", experts[i]);
        }
    }
    try {
        auto made = std::make_unique<Layer>();
        made->local_of_expert.assign(static_cast<size_t>(kernel->n_expert), -1);
        for (int32_t i = 0; i < n_held; ++i) {
            made->local_of_expert[experts[i]] = i;
        }
        made->n_held = n_held;
        made->context.reset(
            lib.ggml_init({lib.ggml_tensor_overhead() * (KVASIR_TENSOR_COUNT + 1), nullptr, true}));
        if (!made->context) {
            throw std::bad_alloc();
        }
        kernel->layers[layer] = std::move(made);
    } catch (const std::bad_alloc &) {
        return fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for layer %d", layer);
    }
    return KVASIR_KERNEL_DONE;
}

extern "C" int32_t kvasir_kernel_add_tensor(kvasir_kernel * kernel, int32_t layer, int32_t tensor,
                                            int32_t type, const int64_t * shape, int32_t n_dims) {
    const std::lock_guard<std::mutex> lock(kernel->mutex);
    Fault & fault = kernel->fault;
    Layer * there = kernel->layer_of(layer);
    if (there == nullptr) {
        return fault.say(KVASIR_KERNEL_UNKNOWN_LAYER, "layer %d is not there", layer);
    }
    if (tensor < 0 || tensor >= KVASIR_TENSOR_COUNT || there->tensors[tensor].tensor != nullptr) {
        return fault.say(KVASIR_KERNEL_INVALID, "tensor %d is out of range or already there", tensor);
    }
    const char * part = kPartNames[tensor / 3];
    const int kind    = kvasir::tensor_kind(tensor);
    const int dims    = kind == KVASIR_KIND_WEIGHT ? 2 : kind == KVASIR_KIND_BIAS ? 1 : 0;
    if (n_dims != dims) {
        return fault.say(KVASIR_KERNEL_INVALID, "%s %s has %d dimensions", part, kKindNames[kind], n_dims);
    }
    for (int32_t i = 0; i < n_dims; ++i) {
        if (shape[i] < 1 || shape[i] > kWidthMax) {
            return fault.say(KVASIR_KERNEL_INVALID, "%s %s is too large or empty", part, kKindNames[kind]);
        }
    }
    const auto is_fit = kernel->is_processor ? can_multiply : has_blocks;
    if (kind == KVASIR_KIND_WEIGHT ? !is_fit(type, shape[0]) : type != TYPE_F32) {
        return fault.say(KVASIR_KERNEL_INVALID, "%s %s has type %d, which this kernel cannot use", part,
                         kKindNames[kind], type);
    }
    HeldTensor & held    = there->tensors[tensor];
    const int64_t n_held = there->n_held;
    Context * context    = there->context.get();
    size_t row_size;
    Tensor * made;
    if (kind == KVASIR_KIND_WEIGHT) {
        row_size         = lib.ggml_row_size(type, shape[0]);
        held.expert_size = row_size * static_cast<size_t>(shape[1]);
    } else {
        held.expert_size = sizeof(float) * static_cast<size_t>(kind == KVASIR_KIND_BIAS ? shape[0] : 1);
    }
    if (held.expert_size > (static_cast<size_t>(1) << 46) / static_cast<size_t>(n_held)) {
        return fault.say(KVASIR_KERNEL_INVALID, "%s %s is too large", part, kKindNames[kind]);
    }
    const size_t size = held.expert_size * static_cast<size_t>(n_held);
    size_t room       = size;
    if (kernel->device != nullptr && kind == KVASIR_KIND_WEIGHT &&
        !device_can_multiply(kernel->device, kernel->memory, type, shape, n_held, room)) {
        return fault.say(KVASIR_KERNEL_INVALID, "%s %s has type %s, which the device does not multiply by", part,
                         kKindNames[kind], lib.ggml_type_name(type));
    }
    held.buffer.reset(lib.ggml_backend_buft_alloc_buffer(kernel->memory, room));
    if (!held.buffer) {
        return fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for %zu bytes of %s %s", room, part,
                         kKindNames[kind]);
    }
    void * const base = lib.ggml_backend_buffer_get_base(held.buffer.get());
    if (kernel->device == nullptr) {
        prefer_huge_pages(base, size);
    } else {
        lib.ggml_backend_buffer_set_usage(held.buffer.get(), USAGE_WEIGHTS);
    }
    if (kind == KVASIR_KIND_WEIGHT) {
        made = lib.ggml_new_tensor_3d(context, type, shape[0], shape[1], n_held);
    } else if (kind == KVASIR_KIND_BIAS) {
        made = lib.ggml_new_tensor_2d(context, type, shape[0], n_held);
    } else {
        made = lib.ggml_new_tensor_2d(context, type, n_held, 1);
    }
    if (lib.ggml_nbytes(made) != size ||
        lib.ggml_backend_tensor_alloc(held.buffer.get(), made, base) != STATUS_SUCCESS) {
        held.buffer.reset();
        return fault.say(KVASIR_KERNEL_INVALID, "%s %s cannot be placed", part, kKindNames[kind]);
    }
    try {
        held.set.assign(static_cast<size_t>(n_held), false);
    } catch (const std::bad_alloc &) {
        held.buffer.reset();
        return fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for %s %s", part, kKindNames[kind]);
    }
    held.tensor = made;
    kernel->memory_bytes += static_cast<int64_t>(size);
    return KVASIR_KERNEL_DONE;
}

extern "C" int32_t kvasir_kernel_set_expert(kvasir_kernel * kernel, int32_t layer, int32_t tensor,
                                            int32_t expert, const void * data, size_t size) {
    const std::lock_guard<std::mutex> lock(kernel->mutex);
    Fault & fault = kernel->fault;
    Layer * there = kernel->layer_of(layer);
    if (there == nullptr) {
        return fault.say(KVASIR_KERNEL_UNKNOWN_LAYER, "layer %d is not there", layer);
    }
    if (tensor < 0 || tensor >= KVASIR_TENSOR_COUNT || there->tensors[tensor].tensor == nullptr) {
        return fault.say(KVASIR_KERNEL_INVALID, "tensor %d is not there", tensor);
    }
    const int32_t local = expert >= 0 && expert < kernel->n_expert ? there->local_of_expert[expert] : -1;
    if (local < 0) {
        return fault.say(KVASIR_KERNEL_FOREIGN_EXPERT, "expert %d is not held", expert);
    }
    HeldTensor & held = there->tensors[tensor];
    if (size != held.expert_size) {
        return fault.say(KVASIR_KERNEL_INVALID, "an expert has %zu bytes here, not %zu", held.expert_size,
                         size);
    }
    lib.ggml_backend_tensor_set(held.tensor, data, static_cast<size_t>(local) * size, size);
    if (!held.set[local]) {
        held.set[local] = true;
        ++held.n_set;
    }
    there->bindings.clear(); // one that did not fit before may fit now
    return KVASIR_KERNEL_DONE;
}

extern "C" int64_t kvasir_kernel_memory_bytes(kvasir_kernel * kernel) {
    const std::lock_guard<std::mutex> lock(kernel->mutex);
    return kernel->memory_bytes;
}

extern "C" int32_t kvasir_kernel_add_program(kvasir_kernel * kernel, int32_t index,
                                             const kvasir_program_step * steps, int32_t n_steps) {
    const std::lock_guard<std::mutex> lock(kernel->mutex);
    Fault & fault = kernel->fault;
    if (index < 0 || index >= kProgramsMax) {
        return fault.say(KVASIR_KERNEL_INVALID, "program number %d is out of range", index);
    }
    const char * reason = kvasir::program_fault(steps, n_steps);
    if (reason != nullptr) {
        return fault.say(KVASIR_KERNEL_PROGRAM_UNFIT, "%s", reason);
    }
    try {
        kernel->programs[index].steps.assign(steps, steps + n_steps);
        for (auto & layer : kernel->layers) {
            layer.second->bindings.erase(index);
        }
    } catch (const std::bad_alloc &) {
        kernel->programs.erase(index);
        return fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for a program");
    }
    return KVASIR_KERNEL_DONE;
}

extern "C" int32_t kvasir_kernel_bind(kvasir_kernel * kernel, int32_t layer, int32_t index,
                                      int32_t * width_in, int32_t * width_out) {
    const std::lock_guard<std::mutex> lock(kernel->mutex);
    try {
        Layer * there                   = nullptr;
        const kvasir::Program * program = nullptr;
        const Binding * binding         = nullptr;
        const int32_t status            = kernel->bind(layer, index, there, program, binding);
        if (status == KVASIR_KERNEL_DONE) {
            *width_in  = static_cast<int32_t>(binding->width[0]);
            *width_out = static_cast<int32_t>(binding->width[program->steps.size()]);
        }
        return status;
    } catch (const std::bad_alloc &) {
        return kernel->fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for a binding");
    }
}

extern "C" int32_t kvasir_kernel_compute(kvasir_kernel * kernel, int32_t layer, int32_t index, int32_t n_rows,
                                         int32_t n_pairs, const float * x, const int32_t * row_of_pair,
                                         const int32_t * expert_of_pair, float * out) {
    const std::lock_guard<std::mutex> lock(kernel->mutex);
    try {
        Layer * there                   = nullptr;
        const kvasir::Program * program = nullptr;
        const Binding * binding         = nullptr;
        int32_t status                  = kernel->bind(layer, index, there, program, binding);
        if (status == KVASIR_KERNEL_DONE) {
            status = kernel->check_pairs(*there, n_rows, n_pairs, row_of_pair, expert_of_pair);
        }
        if (status == KVASIR_KERNEL_DONE) {
            status = kernel->compute(*there, *program, *binding, n_rows, n_pairs, x, row_of_pair, out);
        }
        return status;
    } catch (const std::bad_alloc &) {
        return kernel->fault.say(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for %d pairs", n_pairs);
    }
}

extern "C" void kvasir_kernel_error(kvasir_kernel * kernel, char * error, size_t error_size) {
    const std::lock_guard<std::mutex> lock(kernel->mutex);
    std::snprintf(error, error_size, "%s", kernel->fault.text);
}
