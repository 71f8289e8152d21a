"""The bound of everything that can be said, and the words a message uses to declare one.

Every number, text, byte string and sequence in a message has a bound, written where the field is declared
(`port: Port`, `reason: Sentence`); the codec refuses to compile a message with an unbounded field. The bounds
are generous for honest nodes and small enough that the largest legal message costs little memory. A limit is
part of the protocol: raising one is a new protocol version. This module knows no message and no encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias


@dataclass(frozen=True, slots=True)
class Range:
    """`low <= number <= high`. A NaN is in no range, an infinity in none of ours."""

    low: int | float
    high: int | float


@dataclass(frozen=True, slots=True)
class Length:
    """`low <= len(value) <= high`: characters of a text, bytes of a byte string, items of a sequence."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Check:
    """A condition no `Range` or `Length` can express; `what` finishes the sentence 'the field is not ...'."""

    holds: Callable[[Any], bool]
    what: str


# --- frames -------------------------------------------------------------------------------------------------
SWARM_FRAME_SIZE_MAX: Final = 2 << 20
"""Bytes of the largest message between nodes: a signed plan with its proof fits."""
MANIFEST_PIECE_SIZE_MAX: Final = 64 << 10
"""Bytes of a model manifest in each answer but the last; 100 layers of 512 experts take 80 of them."""
MANIFEST_PIECES_MAX: Final = 1024
"""64 MiB, the largest manifest."""
EXPERT_PIECE_SIZE_MAX: Final = 64 << 10
"""Bytes of experts in one message from one member to another."""
ENGINE_FRAME_SIZE_MAX: Final = 16 << 20
"""Bytes of the largest message between control and its engine: a prompt in text and in tokens."""
LOCAL_FRAME_SIZE_MAX: Final = 16 << 20
"""Bytes of the largest message between the command line and the daemon."""
SIGNED_SIZE_MAX: Final = 1 << 20
"""Bytes of the largest signed payload with its signature."""
SHARD_SIZE_MAX: Final = 1 << 20
"""Bytes of the largest encoded shard set."""
PROOF_SIZE_MAX: Final = 16 << 10
"""Bytes of the largest term proof: seven votes fit four times over."""

# --- counts -------------------------------------------------------------------------------------------------
ELECTORS_MAX: Final = 7
WORKERS_MAX: Final = 256
HOLDERS_MAX: Final = 8
LAYERS_MAX: Final = 1024
EXPERTS_MAX: Final = 4096
ADDRESSES_MAX: Final = 16
VERSIONS_MAX: Final = 16
CONTEXT_LENGTH_MAX: Final = 1 << 18
"""Positions of the longest session, and so tokens of the longest prompt."""
UINT32_MAX: Final = (1 << 32) - 1
INT63_MAX: Final = (1 << 63) - 1
UINT64_MAX: Final = (1 << 64) - 1

# --- texts --------------------------------------------------------------------------------------------------
SENTENCE_LENGTH_MAX: Final = 1024

Word: TypeAlias = Annotated[str, Length(1, 64)]
"""A short name: a code, a state, a backend."""
OptionalWord: TypeAlias = Annotated[str, Length(0, 64)]
"""A `Word`, or empty where there is nothing to say."""
Sentence: TypeAlias = Annotated[str, Length(0, SENTENCE_LENGTH_MAX)]
"""Something for people to read; may be empty. `as_sentence` makes any text fit."""
Address: TypeAlias = Annotated[str, Length(1, 512)]
"""A libp2p multiaddress, as text."""
ModelAddress: TypeAlias = Annotated[str, Length(1, 2048)]
"""Where on the web a model is."""
MODEL_ADDRESSES_MAX: Final = 8
Host: TypeAlias = Annotated[str, Length(1, 255)]
"""A host name or an IP address."""
FilePath: TypeAlias = Annotated[str, Length(1, 4096)]
"""A path on this machine; never sent to another one."""
Prompt: TypeAlias = Annotated[str, Length(0, 1 << 20)]
Document: TypeAlias = Annotated[str, Length(2, 4 << 20)]
"""JSON, as text."""
Role: TypeAlias = Literal["backbone", "worker"]
"""What an engine process does."""
EndReason: TypeAlias = Literal["length", "end_of_text", "cancelled", "failed"]
"""Why a session is over."""
Accumulation: TypeAlias = Literal["F32", "F16", "BF16", "MIXED", "UNKNOWN"]
"""The worst precision a backend measurably adds in, in one word."""
Kernel: TypeAlias = Literal[
    "ggml-cpu",
    "opencl",
    "ggml-device",
    "emulated-f16",
    "ggml-neon-v8.0",
    "ggml-neon-v8.6",
    "ggml-sse2",
    "ggml-avx2",
    "liar-f16",
    "liar-scaled",
    "liar-zeros",
    "liar-stale",
    "liar-wrong-expert",
    "liar-nan",
    "liar-q4",
    "liar-replayed",
    "liar-odd-blocks",
]
"""What a worker engine computes experts with: ggml's CPU kernels, our own on an OpenCL device, ggml's on any
other device that it has, numpy that adds in F16 to show what the swarm makes of such a node, ggml's CPU
kernels for another instruction set, or one with a planted fault behind ggml's name, to show that an audit
finds it."""
AuditVerdict: TypeAlias = Literal["unfit", "quarantined"]
"""What an audit makes of a node whose rows are wrong: bulk layers only, or nothing at all."""
Rank: TypeAlias = Literal["backbone", "output", "bulk"]
"""A place in the forward pass that a node can fill."""
RANKS: Final[tuple[Rank, ...]] = ("backbone", "output", "bulk")

# --- numbers ------------------------------------------------------------------------------------------------
Port: TypeAlias = Annotated[int, Range(1, 65535)]
PortOrAny: TypeAlias = Annotated[int, Range(0, 65535)]
"""A port to listen on; 0 lets the kernel choose."""
Version: TypeAlias = Annotated[int, Range(1, 65535)]
Count: TypeAlias = Annotated[int, Range(0, INT63_MAX)]
"""Anything counted, any number of bytes."""
Sequence63: TypeAlias = Annotated[int, Range(0, INT63_MAX)]
"""A number that only grows: the sequence of a record, the revision of a plan, the id of a request."""
Nanoseconds: TypeAlias = Annotated[int, Range(0, INT63_MAX)]
Milliseconds: TypeAlias = Annotated[int, Range(1, 24 * 3600 * 1000)]
"""A duration somebody waits; at most a day."""
ThreadCount: TypeAlias = Annotated[int, Range(1, 1024)]
LayerCount: TypeAlias = Annotated[int, Range(1, LAYERS_MAX)]
Layer: TypeAlias = Annotated[int, Range(0, LAYERS_MAX - 1)]
ExpertCount: TypeAlias = Annotated[int, Range(1, EXPERTS_MAX)]
ExpertIndex: TypeAlias = Annotated[int, Range(0, EXPERTS_MAX - 1)]
Position: TypeAlias = Annotated[int, Range(0, CONTEXT_LENGTH_MAX)]
PositionCount: TypeAlias = Annotated[int, Range(1, CONTEXT_LENGTH_MAX)]
TokenCount: TypeAlias = Annotated[int, Range(0, CONTEXT_LENGTH_MAX)]
"""Tokens of a session."""
Token: TypeAlias = Annotated[int, Range(0, (1 << 31) - 1)]
Seed: TypeAlias = Annotated[int, Range(0, UINT64_MAX)]
ExitCode: TypeAlias = Annotated[int, Range(0, 255)]
Probability: TypeAlias = Annotated[float, Range(0.0, 1.0)]
Temperature: TypeAlias = Annotated[float, Range(0.0, 100.0)]
TOP_K_MAX: Final = (1 << 31) - 1
TopK: TypeAlias = Annotated[int, Range(0, TOP_K_MAX)]
Penalty: TypeAlias = Annotated[float, Range(-2.0, 2.0)]
"""Taken from the logit of a token that there was before; OpenAI's bounds."""
LogitBias: TypeAlias = Annotated[float, Range(-100.0, 100.0)]
LOGIT_BIASES_MAX: Final = 1024
LOG_PROBABILITY_MIN: Final = -9999.0
LogProbability: TypeAlias = Annotated[float, Range(LOG_PROBABILITY_MIN, 0.0)]
"""A natural logarithm; of what cannot be, the lowest."""
TOP_TOKENS_MAX: Final = 64
TopTokenCount: TypeAlias = Annotated[int, Range(0, TOP_TOKENS_MAX)]
END_TOKENS_MAX: Final = 64
SESSIONS_TOGETHER_MAX: Final = 64
SessionCount: TypeAlias = Annotated[int, Range(1, SESSIONS_TOGETHER_MAX)]
"""Sessions that decode together in one context."""

# --- bytes --------------------------------------------------------------------------------------------------
Digest: TypeAlias = Annotated[bytes, Length(32, 32)]
"""A SHA-256."""
ClaimDigest: TypeAlias = Annotated[bytes, Length(0, 32)]
"""The digest of the certificates that speak for a node (`CapabilityRecord.claim_digest`), or empty."""
OneTimeToken: TypeAlias = Annotated[bytes, Length(16, 16)]
PublicKey: TypeAlias = Annotated[bytes, Length(32, 32)]
"""A raw Ed25519 public key."""
Signature: TypeAlias = Annotated[bytes, Length(64, 64)]
CertificateDer: TypeAlias = Annotated[bytes, Length(1, 8192)]
PublicKeyDer: TypeAlias = Annotated[bytes, Length(1, 1024)]
"""A SubjectPublicKeyInfo."""
Piece: TypeAlias = Annotated[bytes, Length(0, 4096)]
"""The bytes of one token; alone they need not be valid UTF-8."""
ProofBytes: TypeAlias = Annotated[bytes, Length(1, PROOF_SIZE_MAX)]
"""An encoded `TermProof`."""
SignedBytes: TypeAlias = Annotated[bytes, Length(1, SIGNED_SIZE_MAX)]
"""An encoded `Signed`."""
Payload: TypeAlias = Annotated[bytes, Length(1, SIGNED_SIZE_MAX - 512)]
"""What a `Signed` holds, exactly as it was signed."""
ShardBytes: TypeAlias = Annotated[bytes, Length(1, SHARD_SIZE_MAX)]
"""An encoded `ShardSet`."""

# --- sequences ----------------------------------------------------------------------------------------------
Tokens: TypeAlias = Annotated[tuple[Token, ...], Length(0, CONTEXT_LENGTH_MAX)]
LogitBiases: TypeAlias = Annotated[tuple[tuple[Token, LogitBias], ...], Length(0, LOGIT_BIASES_MAX)]
EndTokens: TypeAlias = Annotated[tuple[Token, ...], Length(0, END_TOKENS_MAX)]
TopTokens: TypeAlias = Annotated[tuple[tuple[Token, LogProbability], ...], Length(0, TOP_TOKENS_MAX)]
"""Likely tokens and their log-probabilities, the likeliest first."""
Versions: TypeAlias = Annotated[tuple[Version, ...], Length(1, VERSIONS_MAX)]
Addresses: TypeAlias = Annotated[tuple[Address, ...], Length(0, ADDRESSES_MAX)]
ChunkSizes: TypeAlias = Annotated[tuple[PositionCount, ...], Length(1, CONTEXT_LENGTH_MAX)]
ChunkTimes: TypeAlias = Annotated[tuple[Nanoseconds, ...], Length(0, CONTEXT_LENGTH_MAX)]


def as_sentence(text: str) -> str:
    """Make any text one line that fits a `Sentence`: what is too long is cut, what nobody sees is replaced.

    For errors on their way out: reporting a failure must not be a second failure, and a file or a stranger
    that is quoted must not write on a terminal.
    """
    if len(text) <= SENTENCE_LENGTH_MAX and text.isprintable():
        return text
    encodable = text.encode("utf-8", "replace").decode("utf-8")
    clean = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in encodable)
    if len(clean) <= SENTENCE_LENGTH_MAX:
        return clean
    return clean[: SENTENCE_LENGTH_MAX - 1] + "…"
