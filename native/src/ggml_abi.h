// Our own declarations of the ggml structs and functions that this library uses (ggml 0.25.3).
//
// Some of them (buffer type, buffer, backend, device, registry) are internal to ggml and in no shipped
// header; all are declared here so that the library compiles without ggml's sources and links to nothing of
// it. ggml_symbols.cpp fills the function table from the copy that is loaded, and ggml_proof.cpp compares these
// declarations with live objects of that copy; nothing here may be trusted before it has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ggml {

constexpr char kVersion[]   = "0.25.3";
constexpr int kBackendApi   = 2;
constexpr int kMaxDims      = 4;
constexpr int kMaxSources   = 10;
constexpr int kOpParamWords = 16;
constexpr int kMaxName      = 64;
constexpr int kMaxThreads   = 512;
constexpr int kTypeCount    = 43;

enum Type : int { TYPE_F32 = 0, TYPE_Q8_0 = 8, TYPE_I32 = 26 };

enum Status : int { STATUS_ALLOC_FAILED = -2, STATUS_FAILED = -1, STATUS_SUCCESS = 0, STATUS_ABORTED = 1 };

enum Op : int {
    OP_NONE       = 0,
    OP_ADD        = 2,
    OP_ADD_ID     = 3,
    OP_MUL        = 7,
    OP_SQR        = 9,
    OP_REPEAT     = 20,
    OP_MUL_MAT_ID = 30,
    OP_SCALE      = 32,
    OP_RESHAPE    = 36,
    OP_VIEW       = 37,
    OP_GET_ROWS   = 40,
    OP_CLAMP      = 50,
    OP_UNARY      = 91,
    OP_GLU        = 100,
};

enum DeviceType : int { DEVICE_CPU = 0, DEVICE_GPU = 1, DEVICE_IGPU = 2, DEVICE_ACCEL = 3 };

enum BufferUsage : int { USAGE_ANY = 0, USAGE_WEIGHTS = 1, USAGE_COMPUTE = 2 };

struct Context;
struct Graph;
struct ThreadPool;
struct Buffer;
struct BufferType;
struct Backend;
struct Device;
struct Registry;
struct Event;
struct GraphOptimizeParams;

// Public in ggml.h.
struct Tensor {
    int type;
    Buffer * buffer;
    int64_t ne[kMaxDims];
    size_t nb[kMaxDims];
    int op;
    int32_t op_params[kOpParamWords];
    int32_t flags;
    Tensor * src[kMaxSources];
    Tensor * view_src;
    size_t view_offs;
    void * data;
    char name[kMaxName];
    void * extra;
    char padding[8];
};

struct InitParams {
    size_t mem_size;
    void * mem_buffer;
    bool no_alloc;
};

struct ThreadPoolParams {
    bool cpumask[kMaxThreads];
    int n_threads;
    int prio;
    uint32_t poll;
    bool strict_cpu;
    bool paused;
};

struct TypeTraitsCpu {
    void (*from_float)(const float *, void *, int64_t);
    void (*vec_dot)(int, float *, size_t, const void *, size_t, const void *, size_t, int);
    int vec_dot_type;
    int64_t nrows;
};

struct DeviceCaps {
    bool async;
    bool host_buffer;
    bool buffer_from_host_ptr;
    bool events;
    bool mmap_support;
};

struct DeviceProps {
    const char * name;
    const char * description;
    size_t memory_free;
    size_t memory_total;
    int type;
    const char * device_id;
    DeviceCaps caps;
};

// From here on internal to ggml (ggml-backend-impl.h).
struct BufferTypeInterface {
    const char * (*get_name)(BufferType *);
    Buffer * (*alloc_buffer)(BufferType *, size_t);
    size_t (*get_alignment)(BufferType *);
    size_t (*get_max_size)(BufferType *);
    size_t (*get_alloc_size)(BufferType *, const Tensor *);
    bool (*is_host)(BufferType *);
};

struct BufferType {
    BufferTypeInterface iface;
    Device * device;
    void * context;
};

struct BufferInterface {
    void (*free_buffer)(Buffer *);
    void * (*get_base)(Buffer *);
    int (*init_tensor)(Buffer *, Tensor *);
    void (*memset_tensor)(Buffer *, Tensor *, uint8_t, size_t, size_t);
    void (*set_tensor)(Buffer *, Tensor *, const void *, size_t, size_t);
    void (*get_tensor)(Buffer *, const Tensor *, void *, size_t, size_t);
    void (*set_tensor_2d)(Buffer *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(Buffer *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(Buffer *, const Tensor *, Tensor *);
    void (*clear)(Buffer *, uint8_t);
    void (*reset)(Buffer *);
};

struct Buffer {
    BufferInterface iface;
    BufferType * buft;
    void * context;
    size_t size;
    int usage;
};

struct BackendInterface {
    const char * (*get_name)(Backend *);
    void (*free)(Backend *);
    void (*set_tensor_async)(Backend *, Tensor *, const void *, size_t, size_t);
    void (*get_tensor_async)(Backend *, const Tensor *, void *, size_t, size_t);
    void (*set_tensor_2d_async)(Backend *, Tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d_async)(Backend *, const Tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor_async)(Backend *, Backend *, const Tensor *, Tensor *);
    void (*synchronize)(Backend *);
    void * (*graph_plan_create)(Backend *, const Graph *);
    void (*graph_plan_free)(Backend *, void *);
    void (*graph_plan_update)(Backend *, void *, const Graph *);
    int (*graph_plan_compute)(Backend *, void *);
    int (*graph_compute)(Backend *, Graph *);
    void (*event_record)(Backend *, Event *);
    void (*event_wait)(Backend *, Event *);
    void (*graph_optimize)(Backend *, Graph *, GraphOptimizeParams *);
};

struct Backend {
    uint8_t (*guid)[16];
    BackendInterface iface;
    Device * device;
    void * context;
};

struct DeviceInterface {
    const char * (*get_name)(Device *);
    const char * (*get_description)(Device *);
    void (*get_memory)(Device *, size_t *, size_t *);
    int (*get_type)(Device *);
    void (*get_props)(Device *, DeviceProps *);
    Backend * (*init_backend)(Device *, const char *);
    BufferType * (*get_buffer_type)(Device *);
    BufferType * (*get_host_buffer_type)(Device *);
    Buffer * (*buffer_from_host_ptr)(Device *, void *, size_t, size_t);
    bool (*supports_op)(Device *, const Tensor *);
    bool (*supports_buft)(Device *, BufferType *);
    bool (*offload_op)(Device *, const Tensor *);
    Event * (*event_new)(Device *);
    void (*event_free)(Device *, Event *);
    void (*event_synchronize)(Device *, Event *);
};

struct Device {
    DeviceInterface iface;
    Registry * reg;
    void * context;
};

struct RegistryInterface {
    const char * (*get_name)(Registry *);
    size_t (*get_device_count)(Registry *);
    Device * (*get_device)(Registry *, size_t);
    void * (*get_proc_address)(Registry *, const char *);
};

struct Registry {
    int api_version;
    RegistryInterface iface;
    void * context;
};

// Every exported function we call: name in the library, member, return type, parameter types.
#define KVASIR_GGML_BASE_FUNCTIONS(X)                                                                        \
    X(ggml_version, const char *, (void))                                                                    \
    X(ggml_op_name, const char *, (int op))                                                                  \
    X(ggml_unary_op_name, const char *, (int op))                                                            \
    X(ggml_glu_op_name, const char *, (int op))                                                              \
    X(ggml_type_name, const char *, (int type))                                                              \
    X(ggml_fp16_to_fp32, float, (uint16_t value))                                                            \
    X(ggml_type_size, size_t, (int type))                                                                    \
    X(ggml_blck_size, int64_t, (int type))                                                                   \
    X(ggml_row_size, size_t, (int type, int64_t ne))                                                         \
    X(ggml_nbytes, size_t, (const Tensor * tensor))                                                          \
    X(ggml_tensor_overhead, size_t, (void))                                                                  \
    X(ggml_graph_overhead_custom, size_t, (size_t size, bool grads))                                         \
    X(ggml_init, Context *, (InitParams params))                                                             \
    X(ggml_free, void, (Context * context))                                                                  \
    X(ggml_new_tensor_2d, Tensor *, (Context * c, int type, int64_t ne0, int64_t ne1))                       \
    X(ggml_new_tensor_3d, Tensor *, (Context * c, int type, int64_t ne0, int64_t ne1, int64_t ne2))          \
    X(ggml_set_name, Tensor *, (Tensor * tensor, const char * name))                                         \
    X(ggml_mul_mat_id, Tensor *, (Context * c, Tensor * as, Tensor * b, Tensor * ids))                       \
    X(ggml_add_id, Tensor *, (Context * c, Tensor * a, Tensor * b, Tensor * ids))                            \
    X(ggml_get_rows, Tensor *, (Context * c, Tensor * a, Tensor * b))                                        \
    X(ggml_glu, Tensor *, (Context * c, Tensor * a, int op, bool swapped))                                   \
    X(ggml_glu_split, Tensor *, (Context * c, Tensor * a, Tensor * b, int op))                               \
    X(ggml_unary, Tensor *, (Context * c, Tensor * a, int op))                                               \
    X(ggml_sqr, Tensor *, (Context * c, Tensor * a))                                                         \
    X(ggml_clamp, Tensor *, (Context * c, Tensor * a, float minimum, float maximum))                         \
    X(ggml_scale_bias, Tensor *, (Context * c, Tensor * a, float s, float b))                                \
    X(ggml_mul, Tensor *, (Context * c, Tensor * a, Tensor * b))                                             \
    X(ggml_reshape_3d, Tensor *, (Context * c, Tensor * a, int64_t ne0, int64_t ne1, int64_t ne2))           \
    X(ggml_view_3d, Tensor *,                                                                                \
      (Context * c, Tensor * a, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1, size_t nb2, size_t o))    \
    X(ggml_new_graph_custom, Graph *, (Context * c, size_t size, bool grads))                                \
    X(ggml_build_forward_expand, void, (Graph * graph, Tensor * tensor))                                     \
    X(ggml_graph_n_nodes, int, (Graph * graph))                                                              \
    X(ggml_graph_node, Tensor *, (Graph * graph, int i))                                                     \
    X(ggml_threadpool_params_init, void, (ThreadPoolParams * params, int n_threads))                         \
    X(ggml_backend_buffer_init, Buffer *, (BufferType *, BufferInterface iface, void * context, size_t))     \
    X(ggml_backend_buffer_free, void, (Buffer * buffer))                                                     \
    X(ggml_backend_buffer_get_base, void *, (Buffer * buffer))                                               \
    X(ggml_backend_buffer_get_size, size_t, (Buffer * buffer))                                               \
    X(ggml_backend_buffer_name, const char *, (Buffer * buffer))                                             \
    X(ggml_backend_buft_name, const char *, (BufferType * buft))                                             \
    X(ggml_backend_buft_alloc_buffer, Buffer *, (BufferType * buft, size_t size))                            \
    X(ggml_backend_buft_get_alignment, size_t, (BufferType * buft))                                          \
    X(ggml_backend_buft_get_device, Device *, (BufferType * buft))                                           \
    X(ggml_backend_buft_is_host, bool, (BufferType * buft))                                                  \
    X(ggml_backend_cpu_buffer_type, BufferType *, (void))                                                    \
    X(ggml_backend_buft_get_alloc_size, size_t, (BufferType * buft, const Tensor * tensor))                  \
    X(ggml_backend_buffer_set_usage, void, (Buffer * buffer, int usage))                                     \
    X(ggml_backend_tensor_set, void, (Tensor * tensor, const void * data, size_t offset, size_t size))       \
    X(ggml_backend_tensor_get, void, (const Tensor * tensor, void * data, size_t offset, size_t size))       \
    X(ggml_backend_view_init, int, (Tensor * tensor))                                                        \
    X(ggml_backend_tensor_alloc, int, (Buffer * buffer, Tensor * tensor, void * address))                    \
    X(ggml_backend_guid, void *, (Backend * backend))                                                        \
    X(ggml_backend_name, const char *, (Backend * backend))                                                  \
    X(ggml_backend_get_device, Device *, (Backend * backend))                                                \
    X(ggml_backend_free, void, (Backend * backend))                                                          \
    X(ggml_backend_graph_compute, int, (Backend * backend, Graph * graph))                                   \
    X(ggml_backend_dev_name, const char *, (Device * device))                                                \
    X(ggml_backend_dev_type, int, (Device * device))                                                         \
    X(ggml_backend_dev_init, Backend *, (Device * device, const char * parameters))                          \
    X(ggml_backend_dev_buffer_type, BufferType *, (Device * device))                                         \
    X(ggml_backend_dev_supports_op, bool, (Device * device, const Tensor * op))                              \
    X(ggml_backend_dev_backend_reg, Registry *, (Device * device))                                           \
    X(ggml_backend_reg_name, const char *, (Registry * reg))                                                 \
    X(ggml_backend_reg_dev_count, size_t, (Registry * reg))                                                  \
    X(ggml_backend_reg_dev_get, Device *, (Registry * reg, size_t index))

#define KVASIR_GGML_CPU_FUNCTIONS(X)                                                                         \
    X(ggml_backend_cpu_init, Backend *, (void))                                                              \
    X(ggml_backend_cpu_reg, Registry *, (void))                                                              \
    X(ggml_backend_cpu_set_n_threads, void, (Backend * backend, int n_threads))                              \
    X(ggml_backend_cpu_set_threadpool, void, (Backend * backend, ThreadPool * pool))                         \
    X(ggml_get_type_traits_cpu, const TypeTraitsCpu *, (int type))                                           \
    X(ggml_threadpool_new, ThreadPool *, (ThreadPoolParams * params))                                        \
    X(ggml_threadpool_free, void, (ThreadPool * pool))

// The loaded ggml. Complete once kvasir_native_bind has returned 0; constant after that.
struct Functions {
#define X(name, result, parameters) result(*name) parameters;
    KVASIR_GGML_BASE_FUNCTIONS(X)
    KVASIR_GGML_CPU_FUNCTIONS(X)
#undef X
};

extern Functions lib;
extern bool lib_bound;

} // namespace ggml
