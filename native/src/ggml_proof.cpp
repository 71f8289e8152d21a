// Proves that the functions in the table are those of the ggml that ggml_abi.h describes.
//
// Reads the stock CPU registry, device, buffer type, buffer and backend through our structs and compares each
// field with the public getters. Apart from how the table is filled, since a library finds ggml in its process
// (ggml_symbols.cpp) and a program is linked to its own (host/linked_ggml.cpp).
#include "ggml_proof.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ggml {
Functions lib;
bool lib_bound = false;
} // namespace ggml

namespace {

using namespace ggml;
using kvasir::Mismatch;

bool same_text(const char * a, const char * b) {
    return a != nullptr && b != nullptr && std::strcmp(a, b) == 0;
}

bool check_names(Mismatch & why) {
    const struct {
        int op;
        const char * name;
    } ops[] = {
        {OP_NONE, "NONE"},     {OP_ADD_ID, "ADD_ID"},         {OP_MUL, "MUL"},     {OP_SQR, "SQR"},
        {OP_REPEAT, "REPEAT"}, {OP_MUL_MAT_ID, "MUL_MAT_ID"}, {OP_SCALE, "SCALE"}, {OP_RESHAPE, "RESHAPE"},
        {OP_VIEW, "VIEW"},     {OP_GET_ROWS, "GET_ROWS"},     {OP_CLAMP, "CLAMP"}, {OP_UNARY, "UNARY"},
        {OP_GLU, "GLU"},       {OP_ADD, "ADD"},
    };
    for (const auto & each : ops) {
        if (!same_text(lib.ggml_op_name(each.op), each.name)) {
            return why.say("operation %d is %s, not %s", each.op, lib.ggml_op_name(each.op), each.name);
        }
    }
    const char * glu[] = {"REGLU",     "GEGLU",       "SWIGLU",      "SWIGLU_OAI",
                          "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_CLAMP"};
    for (int i = 0; i < 7; ++i) {
        if (!same_text(lib.ggml_glu_op_name(i), glu[i])) {
            return why.say("gated unit %d is %s, not %s", i, lib.ggml_glu_op_name(i), glu[i]);
        }
    }
    const char * unary[] = {"ABS",         "SGN",     "NEG",   "STEP",       "TANH",    "ELU",
                            "RELU",        "SIGMOID", "GELU",  "GELU_QUICK", "SILU",    "HARDSWISH",
                            "HARDSIGMOID", "EXP",     "EXPM1", "SOFTPLUS",   "GELU_ERF"};
    for (int i = 0; i < 17; ++i) {
        if (!same_text(lib.ggml_unary_op_name(i), unary[i])) {
            return why.say("unary function %d is %s, not %s", i, lib.ggml_unary_op_name(i), unary[i]);
        }
    }
    if (!same_text(lib.ggml_type_name(TYPE_F32), "f32") || !same_text(lib.ggml_type_name(TYPE_I32), "i32") ||
        !same_text(lib.ggml_type_name(kTypeCount - 1), "q2_0")) {
        return why.say("its tensor types are numbered differently");
    }
    return true;
}

bool check_tensor(Mismatch & why) {
    const size_t size = lib.ggml_tensor_overhead() - 32; // 32: the allocator's object header
    if (size != sizeof(Tensor)) {
        return why.say("its tensor has %zu bytes, not %zu", size, sizeof(Tensor));
    }
    alignas(64) static unsigned char memory[4096];
    Context * context = lib.ggml_init({sizeof memory, memory, true});
    if (context == nullptr) {
        return why.say("it cannot make a context");
    }
    Tensor * base = lib.ggml_new_tensor_3d(context, TYPE_F32, 6, 5, 4);
    lib.ggml_set_name(base, "probe");
    Tensor * view   = lib.ggml_view_3d(context, base, 2, 5, 4, base->nb[1], base->nb[2], 8);
    Tensor * glu    = lib.ggml_glu(context, base, 3, true);
    const bool good = base->type == TYPE_F32 && base->ne[0] == 6 && base->ne[1] == 5 && base->ne[2] == 4 &&
                      base->ne[3] == 1 && base->nb[0] == 4 && base->nb[1] == 24 && base->nb[3] == 480 &&
                      base->op == OP_NONE && same_text(base->name, "probe") && base->buffer == nullptr &&
                      base->data == nullptr && view->op == OP_VIEW && view->src[0] == base &&
                      view->view_src == base && view->view_offs == 8 && glu->op == OP_GLU &&
                      glu->op_params[0] == 3 && glu->op_params[1] == 1 && glu->src[1] == nullptr &&
                      glu->ne[0] == 3 && glu->extra == nullptr;
    lib.ggml_free(context);
    return good || why.say("its tensor's fields lie elsewhere");
}

bool check_backend_objects(Mismatch & why) {
    Registry * reg = lib.ggml_backend_cpu_reg();
    if (reg == nullptr || reg->api_version != kBackendApi) {
        return why.say("its backend interface has version %d, not %d", reg ? reg->api_version : -1,
                       kBackendApi);
    }
    Device * device = lib.ggml_backend_reg_dev_get(reg, 0);
    if (reg->iface.get_device(reg, 0) != device || reg->iface.get_device_count(reg) != 1 ||
        !same_text(reg->iface.get_name(reg), lib.ggml_backend_reg_name(reg))) {
        return why.say("its registry's fields lie elsewhere");
    }
    if (device->reg != reg || device->iface.get_type(device) != lib.ggml_backend_dev_type(device) ||
        device->iface.get_type(device) != DEVICE_CPU || device->iface.offload_op != nullptr ||
        !same_text(device->iface.get_name(device), lib.ggml_backend_dev_name(device))) {
        return why.say("its device's fields lie elsewhere");
    }
    DeviceProps props;
    std::memset(&props, 0, sizeof props);
    device->iface.get_props(device, &props);
    if (!same_text(props.name, lib.ggml_backend_dev_name(device)) || props.type != DEVICE_CPU ||
        !props.caps.buffer_from_host_ptr || props.caps.async) {
        return why.say("its device properties lie elsewhere");
    }
    BufferType * buft = lib.ggml_backend_cpu_buffer_type();
    if (device->iface.get_buffer_type(device) != buft || !device->iface.supports_buft(device, buft) ||
        buft->iface.get_alignment(buft) != lib.ggml_backend_buft_get_alignment(buft) ||
        buft->device != lib.ggml_backend_buft_get_device(buft) || !buft->iface.is_host(buft) ||
        !same_text(buft->iface.get_name(buft), lib.ggml_backend_buft_name(buft))) {
        return why.say("its buffer type's fields lie elsewhere");
    }
    Buffer * buffer = lib.ggml_backend_buft_alloc_buffer(buft, 4096);
    if (buffer == nullptr) {
        return why.say("it cannot allocate a buffer");
    }
    bool good = buffer->buft == buft && buffer->size == lib.ggml_backend_buffer_get_size(buffer) &&
                buffer->size == 4096 && buffer->usage == USAGE_ANY &&
                buffer->iface.get_base(buffer) == lib.ggml_backend_buffer_get_base(buffer) &&
                buffer->iface.clear != nullptr && buffer->iface.reset == nullptr;
    lib.ggml_backend_buffer_free(buffer);
    if (!good) {
        return why.say("its buffer's fields lie elsewhere");
    }
    Backend * backend = lib.ggml_backend_cpu_init();
    if (backend == nullptr) {
        return why.say("it cannot make a CPU backend");
    }
    good = static_cast<void *>(backend->guid) == lib.ggml_backend_guid(backend) &&
           backend->device == device && lib.ggml_backend_get_device(backend) == device &&
           backend->iface.graph_compute != nullptr && backend->iface.graph_optimize == nullptr &&
           backend->iface.synchronize == nullptr && backend->iface.graph_plan_compute != nullptr &&
           same_text(backend->iface.get_name(backend), lib.ggml_backend_name(backend));
    lib.ggml_backend_free(backend);
    return good || why.say("its backend's fields lie elsewhere");
}

bool check_traits(Mismatch & why) {
    const TypeTraitsCpu * f32 = lib.ggml_get_type_traits_cpu(TYPE_F32);
    const TypeTraitsCpu * q80 = lib.ggml_get_type_traits_cpu(TYPE_Q8_0);
    ThreadPoolParams params;
    std::memset(&params, 0xff, sizeof params);
    lib.ggml_threadpool_params_init(&params, 3);
    if (f32 == nullptr || f32->vec_dot == nullptr || f32->vec_dot_type != TYPE_F32 || f32->nrows != 1 ||
        q80 == nullptr || q80->vec_dot_type != 8) {
        return why.say("its table of CPU types lies elsewhere");
    }
    if (params.n_threads != 3 || params.prio != 0 || params.paused || params.cpumask[0] ||
        params.poll > 100) {
        return why.say("its thread pool's parameters lie elsewhere");
    }
    return true;
}

} // namespace

namespace kvasir {

bool Mismatch::say(const char * format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return false;
}

bool prove_ggml(Mismatch & why) {
    if (!same_text(lib.ggml_version(), kVersion)) {
        return why.say("it is version %s, not %s", lib.ggml_version(), kVersion);
    }
    return check_names(why) && check_tensor(why) && check_backend_objects(why) && check_traits(why);
}

} // namespace kvasir
