// The kernel host: our expert kernel as a program of its own, that computes what its input asks for.
//
// It lets arithmetic of another instruction set, or of another machine under an emulator, stand behind the
// same port as the kernels of this process. Every size is checked before it is believed and every payload has
// a maximum, though only the process that started it can speak to it: an emulator is a strange place, and a
// broken pipe must end in a sentence. It has no clock: whoever started it has the deadlines, and kills it.
#include "host_protocol.h"
#include "linked_ggml.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <unistd.h>

using namespace kvasir;

namespace {

constexpr int kExitDone     = 0;
constexpr int kExitUnfit    = 1; // the linked ggml is not the one our declarations are of
constexpr int kExitProtocol = 2;

struct FreeMemory {
    void operator()(void * memory) const { std::free(memory); }
};

// Uninitialised bytes that only grow; untouched ones cost nothing.
class Room {
  public:
    // nullptr without memory.
    unsigned char * reserve(uint64_t size) {
        if (size > size_ || !memory_) {
            memory_.reset(); // first, so that both are never held
            memory_.reset(std::malloc(size == 0 ? 1 : static_cast<size_t>(size)));
            size_ = memory_ ? size : 0;
        }
        return static_cast<unsigned char *>(memory_.get());
    }

  private:
    std::unique_ptr<void, FreeMemory> memory_;
    uint64_t size_ = 0;
};

// How many bytes were read before the end: `size`, unless the input ended or broke.
uint64_t read_all(void * to, uint64_t size) {
    uint64_t done = 0;
    while (done < size) {
        const ssize_t n = read(STDIN_FILENO, static_cast<unsigned char *>(to) + done, size - done);
        if (n > 0) {
            done += static_cast<uint64_t>(n);
        } else if (n == 0 || errno != EINTR) {
            break;
        }
    }
    return done;
}

bool write_all(const void * from, uint64_t size) {
    uint64_t done = 0;
    while (done < size) {
        const ssize_t n = write(STDOUT_FILENO, static_cast<const unsigned char *>(from) + done, size - done);
        if (n >= 0) {
            done += static_cast<uint64_t>(n);
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

// What one request came to.
struct Outcome {
    int32_t status = KVASIR_KERNEL_DONE;
    char reason[kHostReasonMax] = "";
    const void * payload = nullptr;
    uint64_t payload_bytes = 0;

    void refuse(int32_t why, const char * format, ...) __attribute__((format(printf, 3, 4))) {
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(reason, sizeof reason, format, arguments);
        va_end(arguments);
        status = why;
    }
};

bool reply(const Outcome & outcome) {
    const bool done     = outcome.status == KVASIR_KERNEL_DONE;
    const void * body   = done ? outcome.payload : outcome.reason;
    const uint64_t size = done ? outcome.payload_bytes : std::strlen(outcome.reason);
    const HostReply header{kHostReplyMagic, outcome.status, size};
    return write_all(&header, sizeof header) && write_all(body, size);
}

class Host {
  public:
    ~Host() {
        if (kernel_ != nullptr) {
            kvasir_kernel_destroy(kernel_);
        }
    }

    // Answers requests until the input ends or makes no sense; the exit status.
    int serve();

  private:
    void answer(uint32_t operation, const unsigned char * payload, uint64_t size, Outcome & outcome);
    void create(const int32_t * words, Outcome & outcome);
    void compute(const unsigned char * payload, uint64_t size, Outcome & outcome);

    // Passes a kernel's status on, with its own sentence.
    void tell(int32_t status, Outcome & outcome) {
        outcome.status = status;
        if (status != KVASIR_KERNEL_DONE) {
            kvasir_kernel_error(kernel_, outcome.reason, sizeof outcome.reason);
        }
    }

    kvasir_kernel * kernel_ = nullptr;
    Room request_;
    Room rows_;
    int64_t memory_bytes_ = 0;
    int32_t widths_[2]    = {0, 0};
};

int Host::serve() {
    while (true) {
        HostRequest header;
        const uint64_t got = read_all(&header, sizeof header);
        if (got == 0) {
            return kExitDone;
        }
        Outcome outcome;
        if (got != sizeof header) {
            outcome.refuse(kHostProtocol, "the input ended inside a request");
        } else if (header.magic != kHostRequestMagic) {
            outcome.refuse(kHostProtocol, "the input is no request");
        } else if (header.operation < HOST_CREATE || header.operation > HOST_COMPUTE) {
            outcome.refuse(kHostProtocol, "operation %u is not known", header.operation);
        } else if (header.payload_bytes > kHostPayloadMax) {
            outcome.refuse(kHostProtocol, "a request of %llu bytes is too large",
                           static_cast<unsigned long long>(header.payload_bytes));
        }
        if (outcome.status == KVASIR_KERNEL_DONE) {
            unsigned char * payload = request_.reserve(header.payload_bytes);
            if (payload == nullptr) {
                outcome.refuse(kHostProtocol, "no memory for a request");
            } else if (read_all(payload, header.payload_bytes) != header.payload_bytes) {
                outcome.refuse(kHostProtocol, "the input ended inside a request");
            } else {
                answer(header.operation, payload, header.payload_bytes, outcome);
            }
        }
        if (!reply(outcome) || outcome.status == kHostProtocol) {
            return kExitProtocol;
        }
    }
}

void Host::answer(uint32_t operation, const unsigned char * payload, uint64_t size, Outcome & outcome) {
    int32_t words[4] = {0, 0, 0, 0};
    std::memcpy(words, payload, size < sizeof words ? size : sizeof words);
    const auto is_too_short = [&](uint64_t least) {
        if (size < least) {
            outcome.refuse(KVASIR_KERNEL_INVALID, "operation %u has only %llu bytes", operation,
                           static_cast<unsigned long long>(size));
        }
        return size < least;
    };
    const auto is_not = [&](uint64_t exact) {
        if (size != exact) {
            outcome.refuse(KVASIR_KERNEL_INVALID, "operation %u has %llu bytes, not %llu", operation,
                           static_cast<unsigned long long>(size), static_cast<unsigned long long>(exact));
        }
        return size != exact;
    };
    if (operation == HOST_CREATE) {
        if (!is_not(8)) {
            create(words, outcome);
        }
        return;
    }
    if (kernel_ == nullptr) {
        outcome.refuse(KVASIR_KERNEL_INVALID, "there is no kernel yet");
        return;
    }
    switch (operation) {
        case HOST_ADD_LAYER:
            if (!is_too_short(8) && !is_not(8 + 4 * static_cast<uint64_t>(static_cast<uint32_t>(words[1])))) {
                const int32_t * experts = reinterpret_cast<const int32_t *>(payload + 8);
                tell(kvasir_kernel_add_layer(kernel_, words[0], experts, words[1]), outcome);
            }
            break;
        case HOST_ADD_TENSOR:
            if (!is_too_short(16) && !is_not(16 + 8 * static_cast<uint64_t>(static_cast<uint32_t>(words[3])))) {
                const int64_t * shape = reinterpret_cast<const int64_t *>(payload + 16);
                tell(kvasir_kernel_add_tensor(kernel_, words[0], words[1], words[2], shape, words[3]), outcome);
            }
            break;
        case HOST_SET_EXPERT:
            if (!is_too_short(16)) {
                tell(kvasir_kernel_set_expert(kernel_, words[0], words[1], words[2], payload + 16,
                                              static_cast<size_t>(size - 16)),
                     outcome);
            }
            break;
        case HOST_MEMORY:
            if (!is_not(0)) {
                memory_bytes_         = kvasir_kernel_memory_bytes(kernel_);
                outcome.payload       = &memory_bytes_;
                outcome.payload_bytes = sizeof memory_bytes_;
            }
            break;
        case HOST_ADD_PROGRAM:
            if (!is_too_short(8) && !is_not(8 + 32 * static_cast<uint64_t>(static_cast<uint32_t>(words[1])))) {
                const auto * steps = reinterpret_cast<const kvasir_program_step *>(payload + 8);
                tell(kvasir_kernel_add_program(kernel_, words[0], steps, words[1]), outcome);
            }
            break;
        case HOST_BIND:
            if (!is_not(8)) {
                tell(kvasir_kernel_bind(kernel_, words[0], words[1], &widths_[0], &widths_[1]), outcome);
                outcome.payload       = widths_;
                outcome.payload_bytes = sizeof widths_;
            }
            break;
        default:
            if (!is_too_short(16)) {
                compute(payload, size, outcome);
            }
            break;
    }
}

void Host::create(const int32_t * words, Outcome & outcome) {
    if (kernel_ != nullptr) {
        outcome.refuse(KVASIR_KERNEL_INVALID, "there is a kernel already");
        return;
    }
    kernel_ = kvasir_kernel_create(words[0], words[1]);
    if (kernel_ == nullptr) {
        outcome.refuse(KVASIR_KERNEL_INVALID, "no kernel for %d experts with %d threads", words[1], words[0]);
    }
}

void Host::compute(const unsigned char * payload, uint64_t size, Outcome & outcome) {
    int32_t words[4];
    std::memcpy(words, payload, sizeof words);
    const int32_t n_rows = words[2], n_pairs = words[3];
    tell(kvasir_kernel_bind(kernel_, words[0], words[1], &widths_[0], &widths_[1]), outcome);
    if (outcome.status != KVASIR_KERNEL_DONE) {
        return;
    }
    if (n_rows < 1 || n_rows > n_pairs || n_pairs > KVASIR_KERNEL_PAIRS_MAX) {
        outcome.refuse(KVASIR_KERNEL_INVALID, "%d rows in %d pairs are out of range", n_rows, n_pairs);
        return;
    }
    // Widths have 24 bits and pairs 17: nothing overflows.
    const uint64_t tables_bytes = 8 * static_cast<uint64_t>(n_pairs);
    const uint64_t wanted = 16 + tables_bytes + 4 * static_cast<uint64_t>(n_rows) * static_cast<uint64_t>(widths_[0]);
    const uint64_t out_bytes = 4 * static_cast<uint64_t>(n_pairs) * static_cast<uint64_t>(widths_[1]);
    if (size != wanted || out_bytes > kHostPayloadMax) {
        outcome.refuse(KVASIR_KERNEL_INVALID, "%llu bytes are not %d rows of %d for %d pairs of %d",
                       static_cast<unsigned long long>(size), n_rows, widths_[0], n_pairs, widths_[1]);
        return;
    }
    unsigned char * out = rows_.reserve(out_bytes);
    if (out == nullptr) {
        outcome.refuse(KVASIR_KERNEL_OUT_OF_MEMORY, "no memory for %d rows", n_pairs);
        return;
    }
    const int32_t * tables = reinterpret_cast<const int32_t *>(payload + 16);
    const float * x        = reinterpret_cast<const float *>(payload + 16 + tables_bytes);
    tell(kvasir_kernel_compute(kernel_, words[0], words[1], n_rows, n_pairs, x, tables, tables + n_pairs,
                               reinterpret_cast<float *>(out)),
         outcome);
    outcome.payload       = out;
    outcome.payload_bytes = out_bytes;
}

// What ggml's CPU backend says it was compiled for, as much as there is room for.
void describe_features(char * text, size_t size) {
    struct Feature {
        const char * name;
        const char * value;
    };
    using GetFeatures       = Feature * (*)(ggml::Registry *);
    ggml::Registry * reg    = ggml::lib.ggml_backend_cpu_reg();
    void * found            = reg->iface.get_proc_address(reg, "ggml_backend_get_features");
    const Feature * feature = found ? reinterpret_cast<GetFeatures>(found)(reg) : nullptr;
    size_t used             = 0;
    text[0]                 = '\0';
    for (; feature != nullptr && feature->name != nullptr; ++feature) {
        const int n = std::snprintf(text + used, size - used, "%s%s", used ? " " : "", feature->name);
        if (n < 0 || static_cast<size_t>(n) >= size - used) {
            text[used] = '\0';
            return;
        }
        used += static_cast<size_t>(n);
    }
}

} // namespace

int main() {
    Mismatch why;
    if (!bind_linked_ggml(why)) {
        std::fprintf(stderr, "the linked ggml is not the one this program was made for: %s\n", why.text);
        return kExitUnfit;
    }
    HostHello hello{};
    std::memcpy(hello.magic, kHostHelloMagic, sizeof hello.magic);
    hello.version = kHostVersion;
    hello.abi     = KVASIR_NATIVE_ABI;
    std::snprintf(hello.ggml_version, sizeof hello.ggml_version, "%s", ggml::lib.ggml_version());
    describe_features(hello.features, sizeof hello.features);
    return write_all(&hello, sizeof hello) ? Host().serve() : kExitProtocol;
}
