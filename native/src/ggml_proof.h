// The proof that a filled table of functions is that of the ggml which ggml_abi.h describes.
#pragma once

#include "ggml_abi.h"

namespace kvasir {

// What does not fit, in words that go on after "the loaded ggml is not the one this build was made for:".
struct Mismatch {
    char text[256] = "";

    // Always false.
    bool say(const char * format, ...) __attribute__((format(printf, 2, 3)));
};

// Every member of ggml::lib must be set. `lib_bound` is the caller's to set, once this was true.
bool prove_ggml(Mismatch & why);

} // namespace kvasir
