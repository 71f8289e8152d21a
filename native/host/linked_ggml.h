// The ggml that this program is linked to, put in the place where our kernel looks for one.
#pragma once

#include "ggml_proof.h"

namespace kvasir {

// Fills ggml::lib and proves that it is the ggml our declarations are of. False with the reason in `why`.
bool bind_linked_ggml(Mismatch & why);

} // namespace kvasir
