// What a kernel host and whoever started it say to each other over its standard input and output.
//
// The host speaks first: one hello. Then requests and replies take turns, one at a time, each a header and a
// payload; everything is little-endian. A request that can be told apart but makes no sense is answered with a
// status and a sentence, and the host goes on. After bytes that are no request it answers kHostProtocol and
// ends: nothing behind them can be told apart. It ends too, quietly, when its input does between two requests.
// kvasir_node/kernels/kernel_host.py is the other side.
#pragma once

#include "kvasir_native.h"

#include <cstdint>

namespace kvasir {

constexpr uint32_t kHostVersion       = 1;
constexpr uint64_t kHostPayloadMax    = static_cast<uint64_t>(1) << 30; // bytes, of requests and of replies
constexpr uint32_t kHostReasonMax     = 512;                            // bytes of a sentence
constexpr uint32_t kHostRequestMagic  = 0x5152564b;                     // "KVRQ"
constexpr uint32_t kHostReplyMagic    = 0x5052564b;                     // "KVRP"
constexpr int32_t kHostProtocol       = -100; // status beside those of kvasir_kernel: no request
constexpr char kHostHelloMagic[8]     = {'K', 'V', 'A', 'S', 'I', 'R', 'K', 'H'};
constexpr uint32_t kHostFeaturesBytes = 224;

enum HostOperation : uint32_t {
    HOST_CREATE      = 1, // i32 n_threads, n_expert; once, and first
    HOST_ADD_LAYER   = 2, // i32 layer, n_held, experts[n_held]
    HOST_ADD_TENSOR  = 3, // i32 layer, tensor, type, n_dims; i64 shape[n_dims]
    HOST_SET_EXPERT  = 4, // i32 layer, tensor, expert, 0; the expert's bytes
    HOST_MEMORY      = 5, // nothing; reply: i64 bytes
    HOST_ADD_PROGRAM = 6, // i32 index, n_steps; kvasir_program_step steps[n_steps]
    HOST_BIND        = 7, // i32 layer, index; reply: i32 width_in, width_out
    HOST_COMPUTE     = 8, // i32 layer, index, n_rows, n_pairs, row_of_pair[n_pairs], expert_of_pair[n_pairs];
                          // f32 x[n_rows][width_in]; reply: f32 out[n_pairs][width_out]
};

struct HostHello {
    char magic[8];
    uint32_t version;
    uint32_t abi; // KVASIR_NATIVE_ABI
    char ggml_version[16];
    char features[kHostFeaturesBytes]; // what ggml was compiled for: "NEON FP16_VA DOTPROD"
};

struct HostRequest {
    uint32_t magic;
    uint32_t operation;
    uint64_t payload_bytes;
};

struct HostReply {
    uint32_t magic;
    int32_t status; // KVASIR_KERNEL_DONE, or another and then the payload is a sentence
    uint64_t payload_bytes;
};

static_assert(sizeof(HostHello) == 256 && sizeof(HostRequest) == 16 && sizeof(HostReply) == 16, "no padding");
static_assert(sizeof(kvasir_program_step) == 32, "no padding");
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the pipe's numbers are the machine's");

} // namespace kvasir
