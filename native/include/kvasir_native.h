// The C ABI of Kvasir's native library: the ggml hook, the expert kernel, the dispatch primitives.
//
// One caller exists, kvasir_node/native_library.py, which mirrors every declaration below and refuses to
// start when kvasir_native_abi() is not the number it was written against. Nothing here names a ggml type:
// the library finds ggml at run time (kvasir_native_bind) and never links to it.
//
// Threads: a hook may be entered from several decoding threads at once, one context each. A kernel may be
// called from any thread, one call at a time (it locks). The dispatch primitives are pure functions.
#ifndef KVASIR_NATIVE_H
#define KVASIR_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVASIR_NATIVE_ABI 3
#define KVASIR_API __attribute__((visibility("default")))

// ---- The library itself -------------------------------------------------------------------------------

// The number above, as compiled.
KVASIR_API int32_t kvasir_native_abi(void);

// Finds every ggml function this library uses in the three libraries that are *already loaded* under these
// names (SONAMEs), then proves that our struct declarations are theirs. Returns 0, or -1 with a sentence in
// `error`. Must succeed before anything else below is called; calling it again is harmless.
KVASIR_API int32_t kvasir_native_bind(const char * base_name, const char * cpu_name, const char * ggml_name,
                                      char * error, size_t error_size);

// How many different copies of ggml's base library this process has loaded; -1 when it cannot be told.
KVASIR_API int32_t kvasir_native_count_ggml(void);

// ggml_version() of the bound copy; "" before kvasir_native_bind.
KVASIR_API const char * kvasir_native_ggml_version(void);

// ---- Expert programs ----------------------------------------------------------------------------------

// A program computes one output row for each (token, slot) pair, from that pair's input row and the tensors
// of that pair's expert. Every value is one row of floats a pair. Value 0 is the input row, value i is the
// result of the i-th step; the last step's value is the output.
enum kvasir_program_op {
    KVASIR_OP_EXPERT_MATMUL = 1, // a x tensor(weight) of the pair's expert; params: ggml precision words
    KVASIR_OP_EXPERT_ADD    = 2, // a + tensor(bias) of the pair's expert
    KVASIR_OP_EXPERT_SCALE  = 3, // the scalar tensor(scale) of the pair's expert; no input
    KVASIR_OP_GLU           = 4, // params[0] kind, [1] swapped, [2] alpha, [3] limit; b absent: a is halved
    KVASIR_OP_UNARY         = 5, // params[0] kind
    KVASIR_OP_SQUARE        = 6,
    KVASIR_OP_CLAMP         = 7,  // params[0] minimum, [1] maximum (float bits)
    KVASIR_OP_LINEAR        = 8,  // a * params[0] + params[1] (float bits)
    KVASIR_OP_MULTIPLY      = 9,  // a * b, b as wide as a or one float wide
    KVASIR_OP_SLICE         = 10, // params[0] first element, params[1] width
};

// Which tensor of a layer: kvasir_tensor_part * 3 + kvasir_tensor_kind; -1 where a step takes none.
enum kvasir_tensor_part {
    KVASIR_PART_GATE    = 0,
    KVASIR_PART_UP      = 1,
    KVASIR_PART_DOWN    = 2,
    KVASIR_PART_GATE_UP = 3
};
enum kvasir_tensor_kind { KVASIR_KIND_WEIGHT = 0, KVASIR_KIND_SCALE = 1, KVASIR_KIND_BIAS = 2 };

#define KVASIR_TENSOR_COUNT 12
#define KVASIR_PROGRAM_STEPS_MAX 32
#define KVASIR_PROGRAM_MATMULS_MAX 8
#define KVASIR_VALUE_ABSENT (-1)

typedef struct kvasir_program_step {
    int32_t op;
    int32_t input_a;
    int32_t input_b;
    int32_t tensor;
    int32_t params[4];
} kvasir_program_step;

// ---- The hook -----------------------------------------------------------------------------------------

typedef struct kvasir_hook kvasir_hook;

// One MoE layer of one ubatch. Valid only during the callback. `x` is [x_rows, n_embd_in] F32 and `ids` is
// [n_tokens, n_slots] I32, both contiguous copies. Where a row is asked for each slot, `weights` is NULL and
// `out` is [n_tokens, n_slots, n_embd_out] F32. Where each token's weighted sum is asked for, `weights` is
// [n_tokens, n_slots] F32, a copy, and `out` is [n_tokens, n_embd_out] F32: weight 0 x row 0, and then each
// further product added in slot order.
typedef struct kvasir_layer_call {
    int32_t layer;
    int32_t program_index;
    int32_t n_tokens;
    int32_t n_slots;
    int32_t n_embd_in;
    int32_t n_embd_out;
    int32_t x_rows;
    int32_t reserved;
    const float * x;
    const int32_t * ids;
    float * out;
    const float * weights;
} kvasir_layer_call;

#define KVASIR_LAYER_DONE 0
#define KVASIR_LAYER_FAILED (-1)
#define KVASIR_LAYER_ABORTED 1

// Must fill every row of call->out and return KVASIR_LAYER_DONE, or return one of the other two. A callback
// that returns KVASIR_LAYER_DONE and left a row untouched makes the graph fail: a missing row is never a zero
// row.
typedef int32_t (*kvasir_layer_callback)(kvasir_layer_call * call);

KVASIR_API kvasir_hook * kvasir_hook_create(kvasir_layer_callback callback);

// Asks for weighted sums in these layers wherever the graph has the plain form of them (capture.h); elsewhere
// rows are asked for all the same. Before a model uses the hook. Returns 0, or -1 for a number out of range.
KVASIR_API int32_t kvasir_hook_claim_sums(kvasir_hook * hook, const int32_t * layers, int32_t n_layers);

// Returns 0, or -1 when a model or context still uses the hook (it then stays as it is).
KVASIR_API int32_t kvasir_hook_destroy(kvasir_hook * hook);

KVASIR_API void * kvasir_hook_device(kvasir_hook * hook);               // ggml_backend_dev_t
KVASIR_API void * kvasir_hook_buffer_type(kvasir_hook * hook);          // ggml_backend_buffer_type_t
KVASIR_API int64_t kvasir_hook_calls(const kvasir_hook * hook);         // completed callbacks
KVASIR_API int64_t kvasir_hook_rows_unfilled(const kvasir_hook * hook); // rows that a callback left untouched

// Copies program `index` to `steps` (room for KVASIR_PROGRAM_STEPS_MAX). Returns the number of steps, or -1.
KVASIR_API int32_t kvasir_hook_program(kvasir_hook * hook, int32_t index, kvasir_program_step * steps,
                                       int32_t * input_per_slot);

// Why the last failed graph was refused before the callback ran; copies "" when there is nothing to tell.
// Reading clears it.
KVASIR_API void kvasir_hook_take_error(kvasir_hook * hook, char * error, size_t error_size);

// ---- The expert kernel --------------------------------------------------------------------------------

typedef struct kvasir_kernel kvasir_kernel;

#define KVASIR_KERNEL_DONE 0
#define KVASIR_KERNEL_INVALID (-1) // an argument makes no sense
#define KVASIR_KERNEL_UNKNOWN_LAYER (-2)
#define KVASIR_KERNEL_UNKNOWN_PROGRAM (-3)
#define KVASIR_KERNEL_PROGRAM_UNFIT (-4) // the program does not fit this layer's tensors
#define KVASIR_KERNEL_FOREIGN_EXPERT (-5)
#define KVASIR_KERNEL_ROW_OUT_OF_RANGE (-6)
#define KVASIR_KERNEL_OUT_OF_MEMORY (-7)
#define KVASIR_KERNEL_COMPUTE_FAILED (-8)

#define KVASIR_KERNEL_PAIRS_MAX 65536
#define KVASIR_KERNEL_THREADS_MAX 256

// NULL when `n_threads` or `n_expert` is out of range, or without memory.
KVASIR_API kvasir_kernel * kvasir_kernel_create(int32_t n_threads, int32_t n_expert);

// The same on a device of this process's ggml (a ggml_backend_dev_t), whose memory then holds the weights and,
// during a call, rows and results. `n_threads` counts where the device is the processor. NULL also when the
// device cannot be opened. A step that the device does not compute is KVASIR_KERNEL_COMPUTE_FAILED.
KVASIR_API kvasir_kernel * kvasir_kernel_create_on(void * device, int32_t n_threads, int32_t n_expert);
KVASIR_API void kvasir_kernel_destroy(kvasir_kernel * kernel);

// Declares which experts of `layer` are held: `experts` are global ids, ascending.
KVASIR_API int32_t kvasir_kernel_add_layer(kvasir_kernel * kernel, int32_t layer, const int32_t * experts,
                                           int32_t n_held);

// Allocates one tensor of a declared layer. `shape` is one expert's part: [n_in, n_out] of a weight,
// [width] of a bias, [] of a scale. `type` is ggml's number; scales and biases must be F32.
KVASIR_API int32_t kvasir_kernel_add_tensor(kvasir_kernel * kernel, int32_t layer, int32_t tensor,
                                            int32_t type, const int64_t * shape, int32_t n_dims);

// Copies one held expert's bytes; `size` must be exactly its size.
KVASIR_API int32_t kvasir_kernel_set_expert(kvasir_kernel * kernel, int32_t layer, int32_t tensor,
                                            int32_t expert, const void * data, size_t size);

KVASIR_API int64_t kvasir_kernel_memory_bytes(kvasir_kernel * kernel);

// Adds or replaces a program. Checks all that can be checked without a layer.
KVASIR_API int32_t kvasir_kernel_add_program(kvasir_kernel * kernel, int32_t index,
                                             const kvasir_program_step * steps, int32_t n_steps);

// Checks a program against a layer's tensors and tells the widths of its input and output rows.
KVASIR_API int32_t kvasir_kernel_bind(kvasir_kernel * kernel, int32_t layer, int32_t index,
                                      int32_t * width_in, int32_t * width_out);

// Pair p takes row row_of_pair[p] of `x` [n_rows, width_in] through expert expert_of_pair[p] (a global id)
// and writes row p of `out` [n_pairs, width_out]. Everything is checked before anything is computed.
KVASIR_API int32_t kvasir_kernel_compute(kvasir_kernel * kernel, int32_t layer, int32_t index, int32_t n_rows,
                                         int32_t n_pairs, const float * x, const int32_t * row_of_pair,
                                         const int32_t * expert_of_pair, float * out);

// A sentence about the last call that did not return KVASIR_KERNEL_DONE.
KVASIR_API void kvasir_kernel_error(kvasir_kernel * kernel, char * error, size_t error_size);

// ---- Dispatch primitives ------------------------------------------------------------------------------
//
// A layer's own computation pushes everything else out of the caches, so that what these cost is how much is
// run between two layers, not how often: a whole call at once, headers included. The frames' layout is
// kvasir_proto/dispatch.py; the tests hold the two against each other.

#define KVASIR_NOBODY_HOLDS (-1000000)

// One holder's part of a layer call.
typedef struct kvasir_holder_part {
    uint64_t frame;    // in: where its DISPATCH frame goes (header, row_of_pair, expert_of_pair,
                       //     weight_of_pair where the call asks for sums, rows); aligned to 4
    uint64_t capacity; // in: bytes there
    int64_t n_pairs;   // out: how many of the pairs are its own
    int64_t n_rows;    // out: how many distinct rows they need
} kvasir_holder_part;

// What the headers of a call's frames say besides their sizes. Holder i's request is first_request_id + i.
typedef struct kvasir_dispatch_authority {
    uint64_t first_request_id;
    uint32_t epoch;
    uint32_t term;
} kvasir_dispatch_authority;

// How rows travel. Q8_0 needs n_embd_in to be a multiple of 32, and rounds as ggml's CPU backend does.
#define KVASIR_WIRE_F32 0
#define KVASIR_WIRE_Q8_0 1

// Writes every holder's DISPATCH frame, rows in `wire_type`. `pairs` are the indices into ids [n_tokens, n_slots] to send,
// ascending; NULL means all of them. Groups them into `pairs_out` (room for n_pairs) by the holder of their
// expert, each group ascending, groups in the order of holders; each distinct row of x is copied once a holder.
// Returns 0; -1 - i when the expert of the i-th pair (or its holder) is out of range; KVASIR_NOBODY_HOLDS - i
// when holder_of_expert is -1 for it; or 1 when some capacity is below the header and
// (8 or, for sums, 12) * n_pairs + 4 * n_pairs * n_embd_in bytes: then every n_pairs is right, and nothing was
// written.
KVASIR_API int32_t kvasir_pack_call(const kvasir_layer_call * call, int32_t input_per_slot, int32_t wire_type,
                                    const kvasir_dispatch_authority * authority,
                                    const int32_t * holder_of_expert, int32_t n_expert, int32_t n_holders,
                                    const int32_t * pairs, int32_t n_pairs, int32_t * pairs_out,
                                    kvasir_holder_part * parts);

// Turns `n_values` (a multiple of 32) in Q8_0 blocks into F32.
KVASIR_API void kvasir_expand_q8_0(const void * blocks, int64_t n_values, float * out);

// Whether `header` is that of an OK reply to this request with these sizes: 1 or 0. What else it may be is
// for a reader that can say so.
KVASIR_API int32_t kvasir_is_expected_reply(const void * header, uint64_t request_id, uint64_t payload_bytes,
                                            int32_t n_pairs);

// Copies rows[i] to row pairs[i] of `out`. Returns -1 when every value was finite; otherwise the index i of
// the first row that has a value that is not, and that row and those after it have not been written.
KVASIR_API int32_t kvasir_scatter_rows(const float * rows, const int32_t * pairs, int32_t n_pairs,
                                       int32_t n_embd, float * out);

// Counts the rows of an answer where an audit looks at none of them: `ids` [n_tokens, n_slots] says whose row
// each is, `pairs` which of them these are. `until` [n_expert] is how many rows of each expert are still to go by
// unseen, and `whole` of all together, and behind it whether something else is to be done first. Returns 0 when
// all were counted; 1 when none was, since one of them is to be looked at.
KVASIR_API int32_t kvasir_pass_by(const int32_t * ids, const int32_t * pairs, int32_t n_pairs, int32_t * until,
                                  int64_t * whole);

// Weighted sums of rows [n_pairs, n_embd] into `sums` [n_rows, n_embd]: pair p's row times weight_of_pair[p] is
// added to sum row_of_pair[p], in the order of pairs. Every product and every sum is rounded to F32 by itself
// and no zero is added first, so that one holder's sums of all slots are those of ggml's MUL and ADDs bit for
// bit. `row_of_pair` must begin with 0, grow by 0 or 1 and end with n_rows - 1: returns -1, or the first index
// where it does not, and then nothing was written.
KVASIR_API int32_t kvasir_weighted_sums(const float * rows, const int32_t * row_of_pair,
                                        const float * weight_of_pair, int32_t n_pairs, int32_t n_rows,
                                        int32_t n_embd, float * sums);

// One holder's sums of a layer call: of each token of its pairs, [its tokens, n_embd] F32.
typedef struct kvasir_sums_part {
    uint64_t sums;  // address
    uint64_t pairs; // address of indices into [n_tokens, n_slots], ascending
    int64_t n_pairs;
} kvasir_sums_part;

// Adds up the parts of every token in `out` [n_tokens, n_embd]: in the order of the first slot that each part
// has of that token, whoever answered first. Returns -1; or the first pair that is not in exactly one part (an
// index beyond n_tokens * n_slots counts as the last one), and then nothing was written.
KVASIR_API int32_t kvasir_add_sums(const kvasir_sums_part * parts, int32_t n_parts, int32_t n_tokens,
                                   int32_t n_slots, int32_t n_embd, float * out);

#ifdef __cplusplus
}
#endif

#endif
