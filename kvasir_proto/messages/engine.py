"""What a control process and its engine process say to each other over their inherited socket pair.

Control speaks for the swarm, the engine for the hardware: control hands over identity, files, deadlines and
expected diallers, the engine answers with what it loaded, generated or measured. Both run on one machine, so
paths and points in time (on the clock that counts suspend) can be said. What may be asked several times at
once carries something that the answer repeats: a `request` number, a token, a node's or a session's id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, TypeAlias, get_args

from kvasir_proto.audit.evidence import EvidenceBytes
from kvasir_proto.dispatch import PROGRAMS_MAX
from kvasir_proto.ids import Epoch, NodeIdField, SessionIdField, Term
from kvasir_proto.limits import (
    ENGINE_FRAME_SIZE_MAX,
    AuditVerdict,
    CertificateDer,
    ChunkSizes,
    ChunkTimes,
    ClaimDigest,
    Count,
    Digest,
    Document,
    EndReason,
    EndTokens,
    ExitCode,
    FilePath,
    Host,
    Kernel,
    LayerCount,
    Length,
    LogProbability,
    Milliseconds,
    Nanoseconds,
    OneTimeToken,
    OptionalWord,
    Piece,
    Port,
    PortOrAny,
    Position,
    PositionCount,
    Prompt,
    ProofBytes,
    PublicKeyDer,
    Role,
    Seed,
    Sentence,
    Sequence63,
    SessionCount,
    ShardBytes,
    SignedBytes,
    ThreadCount,
    Token,
    TokenCount,
    Tokens,
    TopTokenCount,
    TopTokens,
    Word,
)
from kvasir_proto.measured_kernel import MeasuredKernel
from kvasir_proto.messages import Family
from kvasir_proto.sampling import SamplingOptions

ProgramDigests: TypeAlias = Annotated[tuple[Digest, ...], Length(0, PROGRAMS_MAX)]
"""Of expert programs, in order."""

# --- start and identity -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineHello:
    """The engine's first message: the public key it just made, and what it is."""

    kind: ClassVar[str] = "engine_hello"
    public_key: PublicKeyDer
    pid: Count
    backend: Word


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Control's answer: the engine belongs to this node in this role.

    `binding` is the signed `EngineBinding` that the engine puts into its certificate's extension.
    """

    kind: ClassVar[str] = "engine_identity"
    node_id: NodeIdField
    role: Role
    binding: SignedBytes


@dataclass(frozen=True, slots=True)
class EngineCertificate:
    """The engine's certificate, which control tells to other nodes."""

    kind: ClassVar[str] = "engine_certificate"
    certificate: CertificateDer


@dataclass(frozen=True, slots=True)
class SetFence:
    """Refuse everything under an (epoch, term) below this one. Control persisted it before saying so."""

    kind: ClassVar[str] = "set_fence"
    epoch: Epoch
    term: Term


@dataclass(frozen=True, slots=True)
class SetLease:
    """The engine may decode and emit under this (epoch, term) until the lease's end."""

    kind: ClassVar[str] = "set_lease"
    epoch: Epoch
    term: Term
    lease_end_boottime_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End in good order. The end of the socket means the same, in less good order."""

    kind: ClassVar[str] = "shutdown"


@dataclass(frozen=True, slots=True)
class EngineFault:
    """Something failed. `request` is what failed, or None for what has no number, such as `Listen`."""

    kind: ClassVar[str] = "engine_fault"
    request: Sequence63 | None
    code: Word
    detail: Sentence
    exit_code: ExitCode


@dataclass(frozen=True, slots=True)
class QueryStatistics:
    """Asks for the engine's counters."""

    kind: ClassVar[str] = "query_statistics"
    request: Sequence63


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """The answer to `QueryStatistics`: one JSON object."""

    kind: ClassVar[str] = "engine_statistics"
    request: Sequence63
    values_json: Document


# --- worker -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadShard:
    """Load exactly these experts from the model file, each checked against the model manifest.

    `kernel` is what is to compute them, `kernel_device` on which device where it has a choice: what
    `engine.kernel_device` may say.
    """

    kind: ClassVar[str] = "load_shard"
    request: Sequence63
    manifest_path: FilePath
    source_path: FilePath
    shard: ShardBytes
    threads: ThreadCount
    kernel: Kernel = "ggml-cpu"
    kernel_device: Word = "auto"


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """The answer to `LoadShard`: the memory its weights take, and the digest of the set that was loaded."""

    kind: ClassVar[str] = "shard_loaded"
    request: Sequence63
    memory_bytes: Count
    shard_digest: Digest


@dataclass(frozen=True, slots=True)
class MeasureExperts:
    """Find out how long this model's experts take in that kernel, without loading any of them."""

    kind: ClassVar[str] = "measure_experts"
    request: Sequence63
    manifest_path: FilePath
    threads: ThreadCount
    kernel: Kernel
    kernel_device: Word


@dataclass(frozen=True, slots=True)
class ExpertsMeasured:
    """The answer to `MeasureExperts`: the time of one row through one expert."""

    kind: ClassVar[str] = "experts_measured"
    request: Sequence63
    expert_row_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class CertifyKernel:
    """Measure what a kernel's arithmetic is, with made-up weights of this model's types and shapes.

    `device` and `kernel_build` are what the answer is to carry. What else is asked meanwhile is answered.
    """

    kind: ClassVar[str] = "certify_kernel"
    request: Sequence63
    manifest_path: FilePath
    threads: ThreadCount
    kernel: Kernel
    kernel_device: Word
    device: Word
    kernel_build: Word
    seed: Seed


@dataclass(frozen=True, slots=True)
class CertificationAdvanced:
    """How far a `CertifyKernel` is: so many of so many steps, and what was found last."""

    kind: ClassVar[str] = "certification_advanced"
    request: Sequence63
    n_done: Count
    n_all: Count
    found: Sentence


@dataclass(frozen=True, slots=True)
class KernelCertified:
    """The answer to `CertifyKernel`. `reason` says why it is unfit for what it is unfit for."""

    kind: ClassVar[str] = "kernel_certified"
    request: Sequence63
    measured: MeasuredKernel
    reason: Sentence


@dataclass(frozen=True, slots=True)
class Listen:
    """Listen for data connections there; port 0 lets the system choose."""

    kind: ClassVar[str] = "listen"
    host: Host
    port: PortOrAny


@dataclass(frozen=True, slots=True)
class Listening:
    """The answer to `Listen`: the address that was bound."""

    kind: ClassVar[str] = "listening"
    host: Host
    port: Port


@dataclass(frozen=True, slots=True)
class ExpectDialler:
    """Accept one data connection with this token from the engine with this certificate, until it expires.

    `claim_digest` is that of the certificates that our node shows now: what it is held to on that connection.
    """

    kind: ClassVar[str] = "expect_dialler"
    token: OneTimeToken
    certificate: CertificateDer
    role: Role
    node_id: NodeIdField
    expires_boottime_ns: Nanoseconds
    claim_digest: ClaimDigest = b""


@dataclass(frozen=True, slots=True)
class DiallerExpected:
    """The answer to `ExpectDialler`: from now on the token is good."""

    kind: ClassVar[str] = "dialler_expected"
    token: OneTimeToken


@dataclass(frozen=True, slots=True)
class ChallengeHolder:
    """Send rows that nobody has seen to another node's worker engine, and compare its answers with your own.

    `shard` has the experts to ask about. `activation` is how the node claims to take rows, empty for as the
    reference class does. Rows are drawn from `seed`, which nobody else knows.
    """

    kind: ClassVar[str] = "challenge_holder"
    request: Sequence63
    node_id: NodeIdField
    host: Host
    port: Port
    token: OneTimeToken
    certificate: CertificateDer
    epoch: Epoch
    term: Term
    proof: ProofBytes
    manifest_path: FilePath
    source_path: FilePath
    shard: ShardBytes
    activation: OptionalWord
    seed: Seed


@dataclass(frozen=True, slots=True)
class HolderChallenged:
    """The answer to `ChallengeHolder`. `evidence` is the digest of all rows that went there and came back."""

    kind: ClassVar[str] = "holder_challenged"
    request: Sequence63
    outcome: Literal["verified", "unfit", "quarantined", "inconclusive"]
    reason: Sentence
    n_rows: Count
    n_flipped: Count
    evidence: Digest


@dataclass(frozen=True, slots=True)
class RecomputeRows:
    """Recompute the rows of this evidence (encoded `RowEvidence`, checked), and say what they are.

    What its node claims of its arithmetic is said as in `ConnectHolder`. `programs` are the digests of those
    that the model asks for, where this node knows them: rows of any other are evidence of nothing.
    """

    kind: ClassVar[str] = "recompute_rows"
    request: Sequence63
    manifest_path: FilePath
    source_path: FilePath
    evidence: EvidenceBytes
    adds_in_f32: bool
    activation: OptionalWord
    programs: ProgramDigests = ()


@dataclass(frozen=True, slots=True)
class RowsRecomputed:
    """The answer to `RecomputeRows`: `n_rows` of them are wrong, and that is what follows."""

    kind: ClassVar[str] = "rows_recomputed"
    request: Sequence63
    outcome: Literal["unfit", "quarantined", "right", "inconclusive"]
    reason: Sentence
    n_rows: Count


# --- backbone -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RpcServer:
    """Where llama.cpp's own RPC server listens, and the client library that was built with it."""

    library_path: FilePath
    host: Host
    port: Port


@dataclass(frozen=True, slots=True)
class LoadTrunk:
    """Load the backbone file. `hooked` is false for a plain run of a whole model, to compare with.

    With `compact_activations` rows travel to holders in the smallest wire type that changes no result. With
    `partial_sums` holders of bulk layers answer with weighted sums.
    A session whose experts have lost their last holder waits `coverage_patience_ns` for another.
    `device` is where everything but the routed experts is computed: `none`, `auto`, or a ggml device's name.
    With `audit_path`, the file of the whole model, holders' rows are audited.
    With `rpc`, which goes with a plain run only, llama.cpp computes the routed experts on its RPC server.
    Up to `sessions` of them decode together and share the `n_ctx` cells of the KV cache.
    """

    kind: ClassVar[str] = "load_trunk"
    request: Sequence63
    backbone_path: FilePath
    manifest_path: FilePath
    n_ctx: PositionCount
    n_ubatch: PositionCount
    threads: ThreadCount
    hooked: bool
    kv_type: Literal["f16", "f32"]
    compact_activations: bool
    partial_sums: bool
    coverage_patience_ns: Nanoseconds
    device: Word
    rpc: RpcServer | None
    audit_path: FilePath | None = None
    sessions: SessionCount = 1


@dataclass(frozen=True, slots=True)
class TrunkLoaded:
    """The answer to `LoadTrunk`; `n_ctx` is what llama.cpp gave, `memory_bytes` the resident set.

    `decode_token_ns` is the time of one token without the work of routed experts; 0 where it was not
    measured: without a hook, or where llama.cpp did not decode it. `programs` are the digests of the expert
    programs that it asked for then.
    """

    kind: ClassVar[str] = "trunk_loaded"
    request: Sequence63
    n_layer: LayerCount
    n_vocab: Count
    n_ctx: PositionCount
    has_tokenizer: bool
    memory_bytes: Count
    decode_token_ns: Nanoseconds = 0
    programs: ProgramDigests = ()


@dataclass(frozen=True, slots=True)
class ConnectHolder:
    """Dial this worker's engine, show the token, and expect exactly that certificate.

    `shard` is what it holds, `primary` the part for which it is asked before any other holder; `proof` is the
    term proof that the worker is shown. What it claims of its arithmetic is what an audit holds it to: F32
    sums or not, the format in which it takes rows (empty: as the reference class does), and the digest of the
    certificates that say so.
    """

    kind: ClassVar[str] = "connect_holder"
    node_id: NodeIdField
    host: Host
    port: Port
    token: OneTimeToken
    certificate: CertificateDer
    shard: ShardBytes
    primary: ShardBytes
    proof: ProofBytes
    adds_in_f32: bool = True
    activation: OptionalWord = ""
    claim_digest: ClaimDigest = b""


@dataclass(frozen=True, slots=True)
class HolderConnected:
    """The answer to `ConnectHolder`: the connection is authenticated and open."""

    kind: ClassVar[str] = "holder_connected"
    node_id: NodeIdField


@dataclass(frozen=True, slots=True)
class HolderLost:
    """A holder was given up: it closed, was late, or answered with what cannot be used."""

    kind: ClassVar[str] = "holder_lost"
    node_id: NodeIdField
    code: Word
    reason: Sentence


@dataclass(frozen=True, slots=True)
class AnswersTimed:
    """The mean time of a holder's small answers over ten seconds or more, round trip included."""

    kind: ClassVar[str] = "answers_timed"
    node_id: NodeIdField
    mean_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class HolderJudged:
    """The audit has a verdict of a node: of `n_rows` rows that it looked at `n_foreign` were explained by
    nothing, when `n_rows_asked` had been asked of it. One that is quarantined is lost as well. `claim_digest`
    is what its rows were judged by, as `ConnectHolder` had it.
    """

    kind: ClassVar[str] = "holder_judged"
    node_id: NodeIdField
    verdict: AuditVerdict
    reason: Sentence
    n_rows: Count
    n_foreign: Count
    n_rows_asked: Count
    claim_digest: ClaimDigest


@dataclass(frozen=True, slots=True)
class HolderEvidenced:
    """What was found of a node that was judged, by this claim, can be shown to others: encoded
    `RowEvidence`.
    """

    kind: ClassVar[str] = "holder_evidenced"
    node_id: NodeIdField
    claim_digest: ClaimDigest
    evidence: EvidenceBytes


@dataclass(frozen=True, slots=True)
class RemoveHolder:
    """Dispatch nothing more to this node from the next layer call on."""

    kind: ClassVar[str] = "remove_holder"
    node_id: NodeIdField
    reason: Sentence


@dataclass(frozen=True, slots=True)
class LoadOwnShard:
    """Hold these experts of the trunk's model in this process and serve them as `node_id`'s own.

    They take the place of those held before, between two layer calls; what both sets share is loaded anew
    unless the sets are equal. For those in `primary` no other holder is asked first. `RemoveHolder` with that
    `node_id` drops them. A load that a newer one or a `RemoveHolder` overtook is answered with a fault.
    """

    kind: ClassVar[str] = "load_own_shard"
    request: Sequence63
    node_id: NodeIdField
    source_path: FilePath
    shard: ShardBytes
    primary: ShardBytes
    threads: ThreadCount


@dataclass(frozen=True, slots=True)
class OwnShardLoaded:
    """The answer to `LoadOwnShard`: the memory its weights take, and the digest of the loaded set."""

    kind: ClassVar[str] = "own_shard_loaded"
    request: Sequence63
    memory_bytes: Count
    shard_digest: Digest


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Asks for the token ids that a session would make of this prompt."""

    kind: ClassVar[str] = "tokenize"
    request: Sequence63
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The answer to `Tokenize`."""

    kind: ClassVar[str] = "tokenized"
    request: Sequence63
    token_ids: Tokens


@dataclass(frozen=True, slots=True)
class Generate:
    """Start a session. `prompt` is text, or None and `token_ids` is the prompt.

    It ends with the model's own end of a text, or with one of `end_tokens`. `client` is whose turn it takes.
    With `n_top`, so many of the likeliest tokens' log-probabilities come with each token, and its own. The
    last `n_emitted` of `token_ids` are no prompt: they were emitted before, elsewhere.
    """

    kind: ClassVar[str] = "generate"
    session: SessionIdField
    prompt: Prompt | None
    token_ids: Tokens
    n_tokens: PositionCount
    sampling: SamplingOptions
    deadline_ms: Milliseconds
    client: Word = "local"
    end_tokens: EndTokens = ()
    n_top: TopTokenCount | None = None
    n_emitted: TokenCount = 0


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A session has its place, maybe in a queue. It may come behind the session's first token."""

    kind: ClassVar[str] = "session_opened"
    session: SessionIdField


@dataclass(frozen=True, slots=True)
class TokenEmitted:
    """A token of a session, and the (epoch, term) under whose lease it was sampled.

    Where it `is_last` the session has had all that it may have; `SessionEnded` follows.
    """

    kind: ClassVar[str] = "token_emitted"
    session: SessionIdField
    position: Position
    token: Token
    piece: Piece
    epoch: Epoch
    term: Term
    log_probability: LogProbability | None = None
    top: TopTokens = ()
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session is over. `code` is empty unless `reason` is `failed`.

    `prompt_ns` is the time until its first token, the wait for its turn included; `rows_retried` and
    `hook_calls` are those of all sessions in its time. With `retry_after_ns` it was not even begun, and may
    be later. The `end_token` that ended the text is no part of it.
    """

    kind: ClassVar[str] = "session_ended"
    session: SessionIdField
    reason: EndReason
    code: OptionalWord
    detail: Sentence
    n_prompt: Count
    n_generated: Count
    prompt_ns: Nanoseconds
    decode_ns: Nanoseconds
    rows_retried: Count
    hook_calls: Count
    retry_after_ns: Nanoseconds = 0
    end_token: Token | None = None
    end_log_probability: LogProbability | None = None
    end_top: TopTokens = ()

    @property
    def tokens_per_second(self) -> float:
        """The rate of decoding; the first token belongs to the prompt. 0 where nothing was timed."""
        return max(0, self.n_generated - 1) / (self.decode_ns / 1e9) if self.decode_ns else 0.0


@dataclass(frozen=True, slots=True)
class CancelSession:
    """End a session now; `SessionEnded` follows."""

    kind: ClassVar[str] = "cancel_session"
    session: SessionIdField


@dataclass(frozen=True, slots=True)
class EvaluateLogits:
    """Feed these tokens in batches of these sizes and write the logits of every position to a file.

    With `traces_path`, what is seen inside meanwhile goes to that file: hidden states, and what routers say.
    With `n_ubatch`, so many positions are computed at once, and not as many as in sessions.
    """

    kind: ClassVar[str] = "evaluate_logits"
    request: Sequence63
    token_ids: Tokens
    chunk_sizes: ChunkSizes
    output_path: FilePath
    traces_path: FilePath | None = None
    n_ubatch: PositionCount | None = None


@dataclass(frozen=True, slots=True)
class LogitsEvaluated:
    """The answer to `EvaluateLogits`; `chunk_ns` is the time of each decode, in nanoseconds.

    `layers_ns` is the part of it in which routed experts were asked for; 0 where there is no hook.
    """

    kind: ClassVar[str] = "logits_evaluated"
    request: Sequence63
    positions: Count
    hook_calls: Count
    rows_retried: Count
    chunk_ns: ChunkTimes
    layers_ns: ChunkTimes


EngineMessage: TypeAlias = (
    EngineHello
    | EngineIdentity
    | EngineCertificate
    | SetFence
    | SetLease
    | Shutdown
    | EngineFault
    | QueryStatistics
    | EngineStatistics
    | LoadShard
    | ShardLoaded
    | MeasureExperts
    | ExpertsMeasured
    | CertifyKernel
    | CertificationAdvanced
    | KernelCertified
    | ChallengeHolder
    | HolderChallenged
    | RecomputeRows
    | RowsRecomputed
    | Listen
    | Listening
    | ExpectDialler
    | DiallerExpected
    | LoadTrunk
    | TrunkLoaded
    | ConnectHolder
    | HolderConnected
    | HolderLost
    | AnswersTimed
    | HolderJudged
    | HolderEvidenced
    | RemoveHolder
    | LoadOwnShard
    | OwnShardLoaded
    | Tokenize
    | Tokenized
    | Generate
    | SessionOpened
    | TokenEmitted
    | SessionEnded
    | CancelSession
    | EvaluateLogits
    | LogitsEvaluated
)

ENGINE: Final[Family[EngineMessage]] = Family("engine", get_args(EngineMessage), ENGINE_FRAME_SIZE_MAX)
