// The dispatch primitives: which holder gets which rows, and where their answers go. No state; of ggml only
// how it rounds a row to Q8_0.
#include "ggml_abi.h"
#include "kvasir_native.h"
#include "weighted_sum.h"

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

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "frames and ggml's tensors are little-endian"
#endif

constexpr uint32_t MAGIC        = 0x3141564b; // "KVA1"
constexpr uint8_t KIND_DISPATCH = 3;
constexpr uint8_t KIND_REPLY    = 4;
constexpr uint16_t ASKS_FOR_ROWS = 0;
constexpr uint16_t ASKS_FOR_SUMS = 1;

// The header of a DISPATCH as it travels (kvasir_proto/dispatch.py).
struct dispatch_header {
    uint32_t magic;
    uint8_t kind;
    uint8_t wire_type;
    uint16_t code;
    uint64_t request_id;
    uint64_t payload_bytes;
    uint32_t epoch;
    uint32_t term;
    uint32_t layer;
    uint32_t program;
    uint32_t n_rows;
    uint32_t n_pairs;
};

// The header of a REPLY as it travels.
struct reply_header {
    uint32_t magic;
    uint8_t kind;
    uint8_t wire_type;
    uint16_t code;
    uint64_t request_id;
    uint64_t payload_bytes;
    uint64_t received_ns;
    uint64_t compute_ns;
    uint32_t n_pairs;
    uint32_t padding;
};

static_assert(sizeof(dispatch_header) == 48 && sizeof(reply_header) == 48, "the frames' layout is fixed");

// Groups pairs by holder; see kvasir_pack_call for what is returned. `counts` has one count a holder.
int32_t group_pairs(const int32_t * ids, const int32_t * pairs, int32_t n_pairs, const int32_t * holder_of_expert,
                    int32_t n_expert, std::vector<int32_t> & counts, int32_t * pairs_out) {
    const int32_t n_holders = static_cast<int32_t>(counts.size());
    for (int32_t i = 0; i < n_pairs; ++i) {
        const int32_t id = ids[pairs ? pairs[i] : i];
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
        ++counts[static_cast<size_t>(holder)];
    }
    std::vector<int32_t> next(counts.size());
    int32_t start = 0;
    for (size_t holder = 0; holder < counts.size(); ++holder) {
        next[holder] = start;
        start += counts[holder];
    }
    for (int32_t i = 0; i < n_pairs; ++i) {
        const int32_t pair = pairs ? pairs[i] : i;
        pairs_out[next[static_cast<size_t>(holder_of_expert[ids[pair]])]++] = pair;
    }
    return 0;
}

constexpr int64_t Q8_0_BLOCK = 32;

struct q8_0_block {
    uint16_t step; // F16
    int8_t quants[Q8_0_BLOCK];
};

static_assert(sizeof(q8_0_block) == 34, "ggml's block of Q8_0");

uint64_t row_bytes(int32_t wire_type, int32_t n_embd) {
    const uint64_t width = static_cast<uint64_t>(n_embd);
    return wire_type == KVASIR_WIRE_Q8_0 ? width / Q8_0_BLOCK * sizeof(q8_0_block) : width * sizeof(float);
}

// 32-bit words that travel with each pair of a call.
size_t table_words(const kvasir_layer_call * call) { return call->weights ? 3 : 2; }

// Lays out one holder's payload; returns how many distinct rows it has.
int32_t pack_payload(const kvasir_layer_call * call, bool input_per_slot, int32_t wire_type, const int32_t * pairs,
                     int32_t n_pairs, int32_t * payload) {
    int32_t * row_of_pair    = payload;
    int32_t * expert_of_pair = payload + n_pairs;
    int32_t * weight_of_pair = payload + 2 * static_cast<size_t>(n_pairs); // when there are weights
    const size_t width       = static_cast<size_t>(call->n_embd_in);
    const size_t words       = table_words(call) * static_cast<size_t>(n_pairs);
    uint8_t * rows           = reinterpret_cast<uint8_t *>(payload + words);
    const size_t stride      = static_cast<size_t>(row_bytes(wire_type, call->n_embd_in));
    const auto to_q8_0       = wire_type == KVASIR_WIRE_Q8_0
                                   ? ggml::lib.ggml_get_type_traits_cpu(ggml::TYPE_Q8_0)->from_float
                                   : nullptr;
    int32_t n_rows           = 0;
    int32_t last             = -1;
    for (int32_t i = 0; i < n_pairs; ++i) {
        const int32_t pair   = pairs[i];
        const int32_t source = input_per_slot ? pair : pair / call->n_slots;
        if (source != last) {
            const float * row = call->x + static_cast<size_t>(source) * width;
            uint8_t * place   = rows + static_cast<size_t>(n_rows) * stride;
            if (to_q8_0) {
                to_q8_0(row, place, call->n_embd_in);
            } else {
                std::memcpy(place, row, stride);
            }
            last = source;
            ++n_rows;
        }
        row_of_pair[i]    = n_rows - 1;
        expert_of_pair[i] = call->ids[pair];
        if (call->weights) {
            std::memcpy(weight_of_pair + i, call->weights + pair, sizeof(float));
        }
    }
    return n_rows;
}

} // namespace

extern "C" int32_t kvasir_pack_call(const kvasir_layer_call * call, int32_t input_per_slot, int32_t wire_type,
                                    const kvasir_dispatch_authority * authority,
                                    const int32_t * holder_of_expert, int32_t n_expert, int32_t n_holders,
                                    const int32_t * pairs, int32_t n_pairs, int32_t * pairs_out,
                                    kvasir_holder_part * parts) {
    std::vector<int32_t> counts(static_cast<size_t>(n_holders));
    const int32_t status = group_pairs(call->ids, pairs, n_pairs, holder_of_expert, n_expert, counts, pairs_out);
    if (status != 0) {
        return status;
    }
    const uint64_t table_bytes = 4 * table_words(call);
    const uint64_t pair_bytes  = table_bytes + row_bytes(KVASIR_WIRE_F32, call->n_embd_in);
    bool roomy                 = true;
    for (int32_t i = 0; i < n_holders; ++i) {
        const uint64_t count = static_cast<uint64_t>(counts[static_cast<size_t>(i)]);
        parts[i].n_pairs     = static_cast<int64_t>(count);
        parts[i].n_rows      = 0;
        roomy = roomy && (count == 0 || sizeof(dispatch_header) + count * pair_bytes <= parts[i].capacity);
    }
    if (!roomy) {
        return 1;
    }
    const int32_t * group = pairs_out;
    for (int32_t i = 0; i < n_holders; ++i) {
        const int32_t count = counts[static_cast<size_t>(i)];
        if (count == 0) {
            continue;
        }
        uint8_t * frame   = reinterpret_cast<uint8_t *>(parts[i].frame);
        int32_t * payload = reinterpret_cast<int32_t *>(frame + sizeof(dispatch_header));
        const int32_t n_rows = pack_payload(call, input_per_slot != 0, wire_type, group, count, payload);
        group += count;
        parts[i].n_rows      = n_rows;
        dispatch_header header = {};
        header.magic         = MAGIC;
        header.kind          = KIND_DISPATCH;
        header.wire_type     = static_cast<uint8_t>(wire_type);
        header.code          = call->weights ? ASKS_FOR_SUMS : ASKS_FOR_ROWS;
        header.request_id    = authority->first_request_id + static_cast<uint64_t>(i);
        header.payload_bytes = table_bytes * static_cast<uint64_t>(count) +
                               static_cast<uint64_t>(n_rows) * row_bytes(wire_type, call->n_embd_in);
        header.epoch         = authority->epoch;
        header.term          = authority->term;
        header.layer         = static_cast<uint32_t>(call->layer);
        header.program       = static_cast<uint32_t>(call->program_index);
        header.n_rows        = static_cast<uint32_t>(n_rows);
        header.n_pairs       = static_cast<uint32_t>(count);
        std::memcpy(frame, &header, sizeof header);
    }
    return 0;
}

extern "C" void kvasir_expand_q8_0(const void * blocks, int64_t n_values, float * out) {
    const uint8_t * place = static_cast<const uint8_t *>(blocks);
    for (int64_t i = 0; i < n_values; i += Q8_0_BLOCK) {
        q8_0_block block;
        std::memcpy(&block, place, sizeof block);
        place += sizeof block;
        const float step = ggml::lib.ggml_fp16_to_fp32(block.step);
        for (int64_t j = 0; j < Q8_0_BLOCK; ++j) {
            out[i + j] = step * static_cast<float>(block.quants[j]);
        }
    }
}

extern "C" int32_t kvasir_is_expected_reply(const void * data, uint64_t request_id, uint64_t payload_bytes,
                                            int32_t n_pairs) {
    reply_header header;
    std::memcpy(&header, data, sizeof header);
    return header.magic == MAGIC && header.kind == KIND_REPLY && header.wire_type == 0 && header.code == 0 &&
           header.request_id == request_id && header.payload_bytes == payload_bytes &&
           header.n_pairs == static_cast<uint32_t>(n_pairs);
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

extern "C" int32_t kvasir_pass_by(const int32_t * ids, const int32_t * pairs, int32_t n_pairs, int32_t * until,
                                  int64_t * whole) {
    if (whole[1] != 0 || whole[0] < n_pairs) {
        return 1;
    }
    for (int32_t i = 0; i < n_pairs; ++i) {
        int32_t & left = until[ids[pairs[i]]];
        if (left == 0) {
            while (--i >= 0) {
                ++until[ids[pairs[i]]];
            }
            return 1;
        }
        --left;
    }
    whole[0] -= n_pairs;
    return 0;
}

extern "C" int32_t kvasir_weighted_sums(const float * rows, const int32_t * row_of_pair,
                                        const float * weight_of_pair, int32_t n_pairs, int32_t n_rows,
                                        int32_t n_embd, float * sums) {
    int32_t last = -1;
    for (int32_t i = 0; i < n_pairs; ++i) {
        const int32_t row = row_of_pair[i];
        if (row < last || row > last + 1 || row < 0 || row >= n_rows) {
            return i;
        }
        last = row;
    }
    if (last != n_rows - 1) {
        return n_pairs;
    }
    last = -1;
    for (int32_t i = 0; i < n_pairs; ++i) {
        float * sum = sums + static_cast<size_t>(row_of_pair[i]) * static_cast<size_t>(n_embd);
        kvasir::add_product(rows + static_cast<size_t>(i) * static_cast<size_t>(n_embd), weight_of_pair[i],
                            row_of_pair[i] != last, n_embd, sum);
        last = row_of_pair[i];
    }
    return -1;
}

extern "C" int32_t kvasir_add_sums(const kvasir_sums_part * parts, int32_t n_parts, int32_t n_tokens,
                                   int32_t n_slots, int32_t n_embd, float * out) {
    const int32_t n_pairs = n_tokens * n_slots;
    std::vector<int32_t> part_of_pair(static_cast<size_t>(n_pairs), -1);
    for (int32_t part = 0; part < n_parts; ++part) {
        const int32_t * pairs = reinterpret_cast<const int32_t *>(parts[part].pairs);
        for (int64_t i = 0; i < parts[part].n_pairs; ++i) {
            if (pairs[i] < 0 || pairs[i] >= n_pairs) {
                return n_pairs - 1;
            }
            if (part_of_pair[static_cast<size_t>(pairs[i])] != -1) {
                return pairs[i];
            }
            part_of_pair[static_cast<size_t>(pairs[i])] = part;
        }
    }
    for (int32_t pair = 0; pair < n_pairs; ++pair) {
        if (part_of_pair[static_cast<size_t>(pair)] == -1) {
            return pair;
        }
    }
    const size_t width = static_cast<size_t>(n_embd);
    std::vector<int32_t> last_token(static_cast<size_t>(n_parts), -1); // to which a part has contributed
    std::vector<size_t> next_row(static_cast<size_t>(n_parts));
    for (int32_t token = 0; token < n_tokens; ++token) {
        float * sum = out + static_cast<size_t>(token) * width;
        for (int32_t slot = 0; slot < n_slots; ++slot) {
            const size_t pair = static_cast<size_t>(token) * static_cast<size_t>(n_slots) +
                                static_cast<size_t>(slot);
            const size_t part = static_cast<size_t>(part_of_pair[pair]);
            if (last_token[part] == token) {
                continue;
            }
            last_token[part] = token;
            const float * row = reinterpret_cast<const float *>(parts[part].sums) + next_row[part]++ * width;
            if (slot == 0) {
                std::memcpy(sum, row, width * sizeof(float));
                continue;
            }
            for (size_t i = 0; i < width; ++i) {
                sum[i] += row[i];
            }
        }
    }
    return -1;
}
