// Fills the table of ggml's functions from the ggml that this program is linked to.
#include "linked_ggml.h"

namespace ggml {

extern "C" {
#define X(name, result, parameters) result name parameters;
KVASIR_GGML_BASE_FUNCTIONS(X)
KVASIR_GGML_CPU_FUNCTIONS(X)
#undef X
}

} // namespace ggml

namespace kvasir {

bool bind_linked_ggml(Mismatch & why) {
#define X(name, result, parameters) ggml::lib.name = ggml::name;
    KVASIR_GGML_BASE_FUNCTIONS(X)
    KVASIR_GGML_CPU_FUNCTIONS(X)
#undef X
    ggml::lib_bound = prove_ggml(why);
    return ggml::lib_bound;
}

} // namespace kvasir
