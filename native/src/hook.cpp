// The ggml hook: a buffer type that reserves addresses and stores nothing, and a device that computes a MoE
// layer's expert part by asking somebody else.
//
// llama.cpp places experts' tensors in the buffer type (tensor_buft_overrides); its scheduler then gives the
// device one sub-graph per MoE layer and ubatch. The device says it uses the CPU's buffer type, so rows, ids
// and outputs are plain host memory and nothing is copied between backends. Outputs may share memory with
// inputs (the allocator thinks nodes run one after another), so inputs are copied before the callback.
#include "capture.h"
#include "weighted_sum.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

using namespace ggml;

struct kvasir_hook {
    BufferType buffer_type;
    Device device;
    kvasir_layer_callback callback;
    kvasir::SumLayers sum_layers; // constant once a model uses the hook
    std::atomic<int64_t> calls{0};
    std::atomic<int64_t> rows_unfilled{0};
    std::atomic<int> live{0}; // buffers and backends that point at this hook
    std::mutex mutex;         // guards what follows
    std::vector<kvasir::Program> programs;
    std::string error;
};

namespace {

constexpr size_t kAlignment   = 64;
constexpr size_t kProgramsMax = 64;
constexpr int32_t kLayersMax  = 1 << 16;

kvasir_hook * hook_of(BufferType * buft) { return static_cast<kvasir_hook *>(buft->context); }
kvasir_hook * hook_of(Device * device) { return static_cast<kvasir_hook *>(device->context); }

void set_error(kvasir_hook * hook, int layer, const char * text) {
    const std::lock_guard<std::mutex> lock(hook->mutex);
    char sentence[256];
    if (layer >= 0) {
        std::snprintf(sentence, sizeof sentence, "layer %d cannot be dispatched: %s", layer, text);
    } else {
        std::snprintf(sentence, sizeof sentence, "a sub-graph cannot be dispatched: %s", text);
    }
    hook->error = sentence;
}

// ---- The buffer type that stores nothing ----

struct Reservation {
    void * base;
    size_t size;
    kvasir_hook * hook;
};

Reservation * reservation_of(Buffer * buffer) { return static_cast<Reservation *>(buffer->context); }

void buffer_free(Buffer * buffer) {
    Reservation * reservation = reservation_of(buffer);
    munmap(reservation->base, reservation->size);
    --reservation->hook->live;
    delete reservation;
}

void * buffer_base(Buffer * buffer) { return reservation_of(buffer)->base; }

void buffer_memset_tensor(Buffer *, Tensor *, uint8_t, size_t, size_t) {}
void buffer_set_tensor(Buffer *, Tensor *, const void *, size_t, size_t) {}
void buffer_clear(Buffer *, uint8_t) {}

// Nobody should read experts here; if somebody does, every float they see is a NaN.
void buffer_get_tensor(Buffer *, const Tensor *, void * data, size_t, size_t size) {
    std::memset(data, 0xff, size);
}

const char * buft_name(BufferType *) { return "Kvasir"; }
size_t buft_alignment(BufferType *) { return kAlignment; }
bool buft_is_host(BufferType *) { return false; }

Buffer * buft_alloc(BufferType * buft, size_t size) {
    const size_t page    = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t rounded = (size / page + 1) * page;
    if (rounded < size) {
        return nullptr;
    }
    // No access and no reserve: only addresses are used up, and a stray access faults.
    void * base = mmap(nullptr, rounded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        return nullptr;
    }
    Reservation * reservation = new (std::nothrow) Reservation{base, rounded, hook_of(buft)};
    if (reservation == nullptr) {
        munmap(base, rounded);
        return nullptr;
    }
    BufferInterface iface = {};
    iface.free_buffer     = buffer_free;
    iface.get_base        = buffer_base;
    iface.memset_tensor   = buffer_memset_tensor;
    iface.set_tensor      = buffer_set_tensor;
    iface.get_tensor      = buffer_get_tensor;
    iface.clear           = buffer_clear;
    ++reservation->hook->live;
    return lib.ggml_backend_buffer_init(buft, iface, reservation, size);
}

// ---- The backend: one a context ----

struct HookBackend {
    kvasir_hook * hook;
    kvasir::Capture capture;
    std::vector<float> x;
    std::vector<int32_t> ids;
    std::vector<float> weights;
    std::vector<float> rows; // where the tail is evaluated here
    kvasir_layer_call call = {};
};

const char * backend_name(Backend *) { return "Kvasir"; }

void backend_free(Backend * backend) {
    HookBackend * state = static_cast<HookBackend *>(backend->context);
    --state->hook->live;
    delete state;
    delete backend;
}

// Index of the program in the hook's table, added if it is new; -1 when the table is full.
int program_index(kvasir_hook * hook, const kvasir::Program & program) {
    const std::lock_guard<std::mutex> lock(hook->mutex);
    for (size_t i = 0; i < hook->programs.size(); ++i) {
        if (hook->programs[i] == program) {
            return static_cast<int>(i);
        }
    }
    if (hook->programs.size() == kProgramsMax) {
        return -1;
    }
    hook->programs.push_back(program);
    return static_cast<int>(hook->programs.size()) - 1;
}

void copy_rows(const Tensor * x, std::vector<float> & rows) {
    const size_t width = static_cast<size_t>(x->ne[0]);
    rows.resize(width * static_cast<size_t>(x->ne[1] * x->ne[2]));
    float * to        = rows.data();
    const char * data = static_cast<const char *>(x->data);
    if (x->nb[1] == width * sizeof(float) && x->nb[2] == x->nb[1] * static_cast<size_t>(x->ne[1])) {
        std::memcpy(to, data, rows.size() * sizeof(float));
        return;
    }
    for (int64_t token = 0; token < x->ne[2]; ++token) {
        for (int64_t slot = 0; slot < x->ne[1]; ++slot, to += width) {
            std::memcpy(to, data + token * x->nb[2] + slot * x->nb[1], width * sizeof(float));
        }
    }
}

// The ids are a view of the argsort of all experts: a row is shorter than its stride.
void copy_ids(const Tensor * ids, std::vector<int32_t> & to) {
    const size_t n_slots = static_cast<size_t>(ids->ne[0]);
    to.resize(n_slots * static_cast<size_t>(ids->ne[1]));
    for (int64_t token = 0; token < ids->ne[1]; ++token) {
        std::memcpy(to.data() + token * n_slots, static_cast<const char *>(ids->data) + token * ids->nb[1],
                    n_slots * sizeof(int32_t));
    }
}

// The router's weights are a view of one value a pair, however that lies.
void copy_weights(const Tensor * weights, std::vector<float> & to) {
    to.resize(static_cast<size_t>(weights->ne[1] * weights->ne[2]));
    float * place     = to.data();
    const char * data = static_cast<const char *>(weights->data);
    for (int64_t token = 0; token < weights->ne[2]; ++token) {
        for (int64_t slot = 0; slot < weights->ne[1]; ++slot, ++place) {
            std::memcpy(place, data + token * weights->nb[2] + slot * weights->nb[1], sizeof(float));
        }
    }
}

// Does what the tail says with rows [n_tokens, n_slots, n_embd_out], where nobody was asked for sums.
void evaluate_tail(const kvasir::Tail & tail, const std::vector<float> & rows,
                   const std::vector<float> & weights, const kvasir_layer_call & call, float * out) {
    const size_t width   = static_cast<size_t>(call.n_embd_out);
    const size_t n_slots = static_cast<size_t>(call.n_slots);
    const bool is_added  = tail.n_summed != 0;
    const size_t n_taken = is_added ? static_cast<size_t>(tail.n_summed) : n_slots;
    for (size_t token = 0; token < static_cast<size_t>(call.n_tokens); ++token) {
        for (size_t slot = 0; slot < n_taken; ++slot) {
            const size_t pair = token * n_slots + slot;
            kvasir::add_product(rows.data() + pair * width, weights[pair], !is_added || slot == 0,
                                call.n_embd_out, out + (is_added ? token : pair) * width);
        }
    }
}

// A float that no kernel computes: a NaN with a payload of ours.
constexpr uint32_t kUntouched = 0x7fe5a11e;

size_t rows_asked(const kvasir_layer_call & call) {
    return static_cast<size_t>(call.n_tokens) * (call.weights ? 1 : static_cast<size_t>(call.n_slots));
}

void mark_rows(const kvasir_layer_call & call) {
    const size_t n_rows = rows_asked(call);
    for (size_t i = 0; i < n_rows; ++i) {
        std::memcpy(call.out + i * static_cast<size_t>(call.n_embd_out), &kUntouched, sizeof kUntouched);
    }
}

int64_t count_marked_rows(const kvasir_layer_call & call) {
    const size_t n_rows = rows_asked(call);
    int64_t count       = 0;
    for (size_t i = 0; i < n_rows; ++i) {
        count += std::memcmp(call.out + i * static_cast<size_t>(call.n_embd_out), &kUntouched,
                             sizeof kUntouched) == 0;
    }
    return count;
}

int compute(HookBackend * state, Graph * graph) {
    kvasir_hook * hook = state->hook;
    const Tensor * out = kvasir::output_of(graph);
    if (out == nullptr || out->ne[0] == 0 || out->ne[1] == 0 || out->ne[2] == 0) {
        return STATUS_SUCCESS; // the last layer of a ubatch whose logits nobody asked for
    }
    kvasir::Capture & capture = state->capture;
    if (!kvasir::capture_program(graph, &hook->buffer_type, capture)) {
        set_error(hook, capture.layer, capture.fault);
        return STATUS_FAILED;
    }
    const int index = program_index(hook, capture.program);
    if (index < 0) {
        set_error(hook, capture.layer, "there are too many different programs");
        return STATUS_FAILED;
    }
    copy_rows(capture.x, state->x);
    copy_ids(capture.ids, state->ids);
    kvasir_layer_call & call = state->call;
    call.layer               = capture.layer;
    call.program_index       = index;
    call.n_tokens            = static_cast<int32_t>(capture.n_tokens);
    call.n_slots             = static_cast<int32_t>(capture.n_slots);
    call.n_embd_in           = static_cast<int32_t>(capture.x->ne[0]);
    call.n_embd_out          = static_cast<int32_t>(out->ne[0]);
    call.x_rows              = static_cast<int32_t>(capture.x->ne[1] * capture.x->ne[2]);
    call.x                   = state->x.data();
    call.ids                 = state->ids.data();
    call.out                 = static_cast<float *>(capture.out->data);
    call.weights             = nullptr;
    bool is_tail_ours        = false;
    if (capture.tail.weighted != nullptr) {
        copy_weights(capture.tail.weights(), state->weights);
        // With an input row for each slot a sum for each row sent would be a row for each slot again.
        is_tail_ours = capture.tail.n_summed != capture.n_slots || capture.program.input_per_slot;
        if (is_tail_ours) {
            state->rows.resize(static_cast<size_t>(call.n_tokens) * static_cast<size_t>(call.n_slots) *
                               static_cast<size_t>(call.n_embd_out));
            call.out = state->rows.data();
        } else {
            call.weights = state->weights.data();
        }
    }
    mark_rows(call);
    switch (hook->callback(&call)) {
        case KVASIR_LAYER_DONE: break;
        case KVASIR_LAYER_ABORTED: return STATUS_ABORTED;
        default: return STATUS_FAILED;
    }
    const int64_t unfilled = count_marked_rows(call);
    if (unfilled != 0) {
        hook->rows_unfilled += unfilled;
        set_error(hook, call.layer, "not every row came back");
        return STATUS_FAILED;
    }
    if (is_tail_ours) {
        evaluate_tail(capture.tail, state->rows, state->weights, call,
                      static_cast<float *>(capture.out->data));
    }
    ++hook->calls;
    return STATUS_SUCCESS;
}

int backend_graph_compute(Backend * backend, Graph * graph) {
    HookBackend * state = static_cast<HookBackend *>(backend->context);
    try {
        return compute(state, graph);
    } catch (const std::bad_alloc &) {
        return STATUS_ALLOC_FAILED;
    }
}

uint8_t hook_guid[16] = {0x6b, 0x76, 0x61, 0x73, 0x69, 0x72, 0x2d, 0x68,
                         0x6f, 0x6f, 0x6b, 0x2d, 0x30, 0x30, 0x30, 0x31};

// ---- The device: one a hook ----

const char * device_name(Device *) { return "Kvasir"; }
const char * device_description(Device *) { return "routed experts of a Kvasir swarm"; }
int device_type(Device *) { return DEVICE_ACCEL; }
BufferType * device_buffer_type(Device *) { return lib.ggml_backend_cpu_buffer_type(); }

void device_memory(Device *, size_t * free, size_t * total) {
    *free  = 0;
    *total = 1;
}

void device_props(Device * device, DeviceProps * props) {
    props->name        = device_name(device);
    props->description = device_description(device);
    props->type        = device_type(device);
    device_memory(device, &props->memory_free, &props->memory_total);
}

Backend * device_init_backend(Device * device, const char *) {
    HookBackend * state = new (std::nothrow) HookBackend{};
    Backend * backend   = new (std::nothrow) Backend{};
    if (state == nullptr || backend == nullptr) {
        delete state;
        delete backend;
        return nullptr;
    }
    state->hook                  = hook_of(device);
    backend->guid                = &hook_guid;
    backend->iface.get_name      = backend_name;
    backend->iface.free          = backend_free;
    backend->iface.graph_compute = backend_graph_compute;
    backend->device              = device;
    backend->context             = state;
    ++state->hook->live;
    return backend;
}

bool device_supports_op(Device * device, const Tensor * node) {
    const kvasir_hook * hook = hook_of(device);
    return kvasir::is_taken(node, &hook->buffer_type, hook->sum_layers);
}

bool device_supports_buft(Device * device, BufferType * buft) {
    return buft == &hook_of(device)->buffer_type || lib.ggml_backend_buft_is_host(buft);
}

// llama.cpp asks a device's registry for optional functions; there are none, and the device is not
// registered.
const char * registry_name(Registry *) { return "Kvasir"; }
size_t registry_count(Registry *) { return 0; }
Device * registry_device(Registry *, size_t) { return nullptr; }
void * registry_function(Registry *, const char *) { return nullptr; }

Registry hook_registry = {
    kBackendApi, {registry_name, registry_count, registry_device, registry_function}, nullptr};

} // namespace

extern "C" kvasir_hook * kvasir_hook_create(kvasir_layer_callback callback) {
    kvasir_hook * hook = lib_bound ? new (std::nothrow) kvasir_hook{} : nullptr;
    if (hook == nullptr) {
        return nullptr;
    }
    hook->callback = callback;

    BufferType & buft        = hook->buffer_type;
    buft.iface.get_name      = buft_name;
    buft.iface.alloc_buffer  = buft_alloc;
    buft.iface.get_alignment = buft_alignment;
    buft.iface.is_host       = buft_is_host;
    buft.device              = &hook->device;
    buft.context             = hook;

    Device & device              = hook->device;
    device.iface.get_name        = device_name;
    device.iface.get_description = device_description;
    device.iface.get_memory      = device_memory;
    device.iface.get_type        = device_type;
    device.iface.get_props       = device_props;
    device.iface.init_backend    = device_init_backend;
    device.iface.get_buffer_type = device_buffer_type;
    device.iface.supports_op     = device_supports_op;
    device.iface.supports_buft   = device_supports_buft;
    device.reg                   = &hook_registry;
    device.context               = hook;
    return hook;
}

extern "C" int32_t kvasir_hook_claim_sums(kvasir_hook * hook, const int32_t * layers, int32_t n_layers) {
    kvasir::SumLayers claimed;
    for (int32_t i = 0; i < n_layers; ++i) {
        if (layers[i] < 0 || layers[i] >= kLayersMax) {
            return -1;
        }
        const size_t layer = static_cast<size_t>(layers[i]);
        if (layer >= claimed.size()) {
            claimed.resize(layer + 1);
        }
        claimed[layer] = true;
    }
    hook->sum_layers = claimed;
    return 0;
}

extern "C" int32_t kvasir_hook_destroy(kvasir_hook * hook) {
    if (hook->live != 0) {
        return -1;
    }
    delete hook;
    return 0;
}

extern "C" void * kvasir_hook_device(kvasir_hook * hook) { return &hook->device; }

extern "C" void * kvasir_hook_buffer_type(kvasir_hook * hook) { return &hook->buffer_type; }

extern "C" int64_t kvasir_hook_calls(const kvasir_hook * hook) { return hook->calls; }

extern "C" int64_t kvasir_hook_rows_unfilled(const kvasir_hook * hook) { return hook->rows_unfilled; }

extern "C" int32_t kvasir_hook_program(kvasir_hook * hook, int32_t index, kvasir_program_step * steps,
                                       int32_t * input_per_slot) {
    const std::lock_guard<std::mutex> lock(hook->mutex);
    if (index < 0 || static_cast<size_t>(index) >= hook->programs.size()) {
        return -1;
    }
    const kvasir::Program & program = hook->programs[static_cast<size_t>(index)];
    std::memcpy(steps, program.steps.data(), program.steps.size() * sizeof program.steps[0]);
    *input_per_slot = program.input_per_slot ? 1 : 0;
    return static_cast<int32_t>(program.steps.size());
}

extern "C" void kvasir_hook_take_error(kvasir_hook * hook, char * error, size_t error_size) {
    const std::lock_guard<std::mutex> lock(hook->mutex);
    std::snprintf(error, error_size, "%s", hook->error.c_str());
    hook->error.clear();
}
