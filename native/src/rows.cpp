// The dispatch primitives: which holder gets which rows, and where their answers go. No ggml, no state.
#include "kvasir_native.h"

#include <cstring>
#include <vector>

namespace {

// True when no value of the row is an infinity or a NaN (all exponent bits set).
bool all_finite(const float * row, int32_t n) {
    uint32_t bad = 0;
    for (int32_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, row + i, sizeof bits);
        bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
    }
    return bad == 0;
}

} // namespace

extern "C" int32_t kvasir_partition(const int32_t * ids, int32_t n_pairs, const int32_t * holder_of_expert,
                                    int32_t n_expert, int32_t n_holders, int32_t * pairs_out,
                                    int32_t * counts_out) {
    for (int32_t holder = 0; holder < n_holders; ++holder) {
        counts_out[holder] = 0;
    }
    for (int32_t i = 0; i < n_pairs; ++i) {
        const int32_t id = ids[i];
        if (id < 0 || id >= n_expert) {
            return -1 - i;
        }
        const int32_t holder = holder_of_expert[id];
        if (holder == -1) {
            return KVASIR_NOBODY_HOLDS - i;
        }
        if (holder < 0 || holder >= n_holders) {
            return -1 - i;
        }
        ++counts_out[holder];
    }
    // Place each group: turn counts into ends, fill from the back so that groups stay ascending.
    int32_t end = 0;
    for (int32_t holder = 0; holder < n_holders; ++holder) {
        end += counts_out[holder];
        counts_out[holder] = end;
    }
    for (int32_t i = n_pairs - 1; i >= 0; --i) {
        pairs_out[--counts_out[holder_of_expert[ids[i]]]] = i;
    }
    // counts_out now holds each group's start; the next start (or the total) minus it is the count.
    for (int32_t holder = 0; holder < n_holders; ++holder) {
        const int32_t next = holder + 1 < n_holders ? counts_out[holder + 1] : n_pairs;
        counts_out[holder] = next - counts_out[holder];
    }
    return 0;
}

extern "C" int32_t kvasir_pack_rows(const float * x, int32_t n_embd, int32_t n_slots, int32_t input_per_slot,
                                    const int32_t * ids, const int32_t * pairs, int32_t n_pairs,
                                    int32_t * row_of_pair, int32_t * expert_of_pair, float * rows_out) {
    int32_t n_rows = 0;
    int32_t last   = -1;
    for (int32_t i = 0; i < n_pairs; ++i) {
        const int32_t pair   = pairs[i];
        const int32_t source = input_per_slot ? pair : pair / n_slots;
        if (source != last) {
            std::memcpy(rows_out + static_cast<size_t>(n_rows) * n_embd,
                        x + static_cast<size_t>(source) * n_embd,
                        static_cast<size_t>(n_embd) * sizeof(float));
            last = source;
            ++n_rows;
        }
        row_of_pair[i]    = n_rows - 1;
        expert_of_pair[i] = ids[pair];
    }
    return n_rows;
}

extern "C" int32_t kvasir_pack_call(const kvasir_layer_call * call, int32_t input_per_slot,
                                    const int32_t * holder_of_expert, int32_t n_expert, int32_t n_holders,
                                    int32_t * pairs_out, kvasir_holder_part * parts) {
    std::vector<int32_t> counts(static_cast<size_t>(n_holders));
    const int32_t status = kvasir_partition(call->ids, call->n_tokens * call->n_slots, holder_of_expert, n_expert,
                                            n_holders, pairs_out, counts.data());
    if (status != 0) {
        return status;
    }
    bool roomy = true;
    for (int32_t i = 0; i < n_holders; ++i) {
        const uint64_t n_pairs = static_cast<uint64_t>(counts[i]);
        parts[i].n_pairs       = counts[i];
        parts[i].n_rows        = 0;
        roomy = roomy && n_pairs * (8 + 4 * static_cast<uint64_t>(call->n_embd_in)) <= parts[i].capacity;
    }
    if (!roomy) {
        return 1;
    }
    const int32_t * pairs = pairs_out;
    for (int32_t i = 0; i < n_holders; ++i) {
        const int32_t n_pairs = counts[i];
        if (n_pairs > 0) {
            int32_t * row_of_pair = reinterpret_cast<int32_t *>(parts[i].payload);
            parts[i].n_rows =
                kvasir_pack_rows(call->x, call->n_embd_in, call->n_slots, input_per_slot, call->ids, pairs, n_pairs,
                                 row_of_pair, row_of_pair + n_pairs, reinterpret_cast<float *>(row_of_pair + 2 * n_pairs));
            pairs += n_pairs;
        }
    }
    return 0;
}

extern "C" int32_t kvasir_scatter_rows(const float * rows, const int32_t * pairs, int32_t n_pairs,
                                       int32_t n_embd, float * out) {
    const size_t width = static_cast<size_t>(n_embd);
    for (int32_t i = 0; i < n_pairs; ++i) {
        const float * row = rows + static_cast<size_t>(i) * width;
        if (!all_finite(row, n_embd)) {
            return i;
        }
        std::memcpy(out + static_cast<size_t>(pairs[i]) * width, row, width * sizeof(float));
    }
    return -1;
}
