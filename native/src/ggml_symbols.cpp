// Finds ggml in the process, and has ggml_proof.cpp prove that it is the one ggml_abi.h describes.
//
// The three libraries must already be loaded (llama_cpp loads them): they are looked up with RTLD_NOLOAD, so
// this file can never bring a second copy into the process.
#include "ggml_proof.h"
#include "kvasir_native.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#if defined(__linux__)
#include <link.h>
#endif

namespace {

using namespace ggml;
using kvasir::Mismatch;

void * loaded(const char * name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); }

template <typename F> bool resolve(void * library, const char * name, F *& member, Mismatch & why) {
    member = reinterpret_cast<F *>(dlsym(library, name));
    return member != nullptr || why.say("it has no function %s", name);
}

bool resolve_all(void * base, void * cpu, Mismatch & why) {
#define X(name, result, parameters)                                                                          \
    if (!resolve(base, #name, lib.name, why)) {                                                              \
        return false;                                                                                        \
    }
    KVASIR_GGML_BASE_FUNCTIONS(X)
#undef X
#define X(name, result, parameters)                                                                          \
    if (!resolve(cpu, #name, lib.name, why)) {                                                               \
        return false;                                                                                        \
    }
    KVASIR_GGML_CPU_FUNCTIONS(X)
#undef X
    return true;
}

bool bind(const char * base_name, const char * cpu_name, const char * ggml_name, Mismatch & why) {
    void * base = loaded(base_name);
    void * cpu  = loaded(cpu_name);
    void * top  = loaded(ggml_name);
    if (base == nullptr || cpu == nullptr || top == nullptr) {
        return why.say("%s is not loaded", base == nullptr  ? base_name
                                           : cpu == nullptr ? cpu_name
                                                            : ggml_name);
    }
    return resolve_all(base, cpu, why) && kvasir::prove_ggml(why);
}

} // namespace

extern "C" int32_t kvasir_native_abi(void) { return KVASIR_NATIVE_ABI; }

extern "C" const char * kvasir_native_ggml_version(void) {
    return ggml::lib_bound ? ggml::lib.ggml_version() : "";
}

extern "C" int32_t kvasir_native_bind(const char * base_name, const char * cpu_name, const char * ggml_name,
                                      char * error, size_t error_size) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    if (ggml::lib_bound) {
        return 0;
    }
    Mismatch why;
    if (!bind(base_name, cpu_name, ggml_name, why)) {
        std::snprintf(error, error_size, "the loaded ggml is not the one this build was made for: %s",
                      why.text);
        return -1;
    }
    ggml::lib_bound = true;
    return 0;
}

#if defined(__linux__)
namespace {

int count_base_library(struct dl_phdr_info * info, size_t, void * count) {
    const char * slash = std::strrchr(info->dlpi_name, '/');
    const char * name  = slash ? slash + 1 : info->dlpi_name;
    if (std::strncmp(name, "libggml-base", 12) == 0) {
        ++*static_cast<int32_t *>(count);
    }
    return 0;
}

} // namespace

extern "C" int32_t kvasir_native_count_ggml(void) {
    int32_t count = 0;
    dl_iterate_phdr(count_base_library, &count);
    return count;
}
#else
extern "C" int32_t kvasir_native_count_ggml(void) { return -1; }
#endif
