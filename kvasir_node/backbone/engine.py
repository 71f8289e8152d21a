"""The backbone engine: the trunk, its hook and dispatcher, and the sessions that run on them.

Control's messages arrive in the engine's main thread. Sessions' prompts become tokens in one thread and are
decoded in that of their context; one more takes jobs from a bounded queue (loading, evaluations) and uses the
trunk when no ubatch is under way. Connections to holders are made, and experts of this node's own loaded, in
short-lived threads, and handed to the dispatcher when they are ready to be asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvasir_node.backbone.dispatcher import Dispatcher, LocalHolder
from kvasir_node.backbone.holder import RemoteHolder, open_remote_holder
from kvasir_node.backbone.hook import DecodeAborted, ExpertHook, LayerCall, fill_with_zeros
from kvasir_node.backbone.patient_decode import decode_patiently
from kvasir_node.backbone.rpc_experts import RpcExperts
from kvasir_node.backbone.session_reports import Counters, SessionReports
from kvasir_node.backbone.sessions import ExclusiveUse, SessionContext, Sessions, WantedSession
from kvasir_node.backbone.token_speed import measure_token_ns
from kvasir_node.backbone.traces import TraceRecorder, write_traces
from kvasir_node.backbone.trunk import ExpertSource, Trunk, TrunkSettings
from kvasir_node.engine.certificate import key_and_binding
from kvasir_node.engine.channel import ControlChannel, fault_of
from kvasir_node.engine.lease import LeaseWatch, boottime_ns
from kvasir_node.engine.tls import EngineCredentials, connect_pinned
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.logits_file import create_logits
from kvasir_node.model.expert_bytes import ExpertSource as ExpertBytes
from kvasir_node.model.manifest_file import read_manifest
from kvasir_node.native_library import load as load_native_library
from kvasir_node.system_words import in_words
from kvasir_node.telemetry import get_logger
from kvasir_proto.audit.verdict import Verdict
from kvasir_proto.dispatch import Opening
from kvasir_proto.errors import (
    EngineFailed,
    KvasirError,
    LocalProtocolError,
    NotReady,
    ProtocolError,
    RemoteProtocolError,
    UsageError,
)
from kvasir_proto.ids import NodeId, SessionId
from kvasir_proto.instants import Duration, Instant
from kvasir_proto.limits import as_sentence
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.messages.engine import (
    AnswersTimed,
    CancelSession,
    ConnectHolder,
    EngineFault,
    EngineMessage,
    EngineStatistics,
    EvaluateLogits,
    Generate,
    HolderConnected,
    HolderEvidenced,
    HolderJudged,
    HolderLost,
    LoadOwnShard,
    LoadTrunk,
    LogitsEvaluated,
    OwnShardLoaded,
    QueryStatistics,
    RemoveHolder,
    SessionEnded,
    SessionOpened,
    SetLease,
    Tokenize,
    Tokenized,
    TrunkLoaded,
)
from kvasir_proto.placement.ranks import bulk_layers, output_layers
from kvasir_proto.program import ExpertProgram
from kvasir_proto.sessions.options import SessionOptions
from kvasir_proto.sessions.requests import Open

if TYPE_CHECKING:
    from kvasir_node.backbone.row_audit import RowAudit

log = get_logger()

JOBS_WAITING_MAX: Final = 8
"""Evaluations and the like that may wait for their thread; one more is refused."""

PROMPTS_WAITING_MAX: Final = 72
"""Sessions whose prompts wait to be made into tokens; one more is refused."""

TRACED_POSITIONS_MAX: Final = 4096
"""What is seen inside stays in memory until all of it is: a megabyte for each position of a large model."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """Work for the jobs' thread; ``request`` is what its answer names, None where there is none."""

    run: Callable[[], None]
    request: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _OwnExperts:
    """The node's own experts as they were handed to the dispatcher."""

    holder: LocalHolder
    shard: ShardSet
    source_path: str
    memory_bytes: int


class BackboneEngine:
    """Handles control's messages for the backbone role. `handle` runs in the engine's main thread."""

    def __init__(self, channel: ControlChannel, credentials: EngineCredentials) -> None:
        self._channel = channel
        self._credentials = credentials
        self._lease = LeaseWatch()
        self._manifest: ModelManifest | None = None
        self._hook: ExpertHook | None = None
        self._dispatcher: Dispatcher | None = None
        self._coverage_patience_ns = 0
        self._trunk: Trunk | None = None
        self._audit: RowAudit | None = None
        self._programs: dict[int, ExpertProgram] = {}
        """The expert program of each layer that was asked for while the trunk was measured."""
        self._layers_ns = 0
        self._recorder: TraceRecorder | None = None
        """Who looks on while logits are evaluated."""
        self._is_measuring = False
        """Experts' rows are zeros while it is found out how long the trunk takes."""
        self._n_calls_measuring = 0
        self._own: _OwnExperts | None = None
        self._own_wanted: LoadOwnShard | None = None
        """The newest request to hold experts; None when none are to be held."""
        self._own_lock = threading.Lock()
        self._jobs: queue.Queue[_Job | None] = queue.Queue(JOBS_WAITING_MAX)
        self._sessions: Sessions | None = None
        self._reports: SessionReports | None = None
        self._exclusive = ExclusiveUse()
        """Of the trunk and the dispatcher."""
        self._opening: set[SessionId] = set()
        """Sessions whose prompts wait to be made into tokens."""
        self._opening_lock = threading.Lock()
        self._prompts: queue.Queue[tuple[Generate, Instant] | None] = queue.Queue(PROMPTS_WAITING_MAX)
        self._jobs_thread = threading.Thread(target=self._run_jobs, name="jobs", daemon=True)
        self._prompts_thread = threading.Thread(target=self._open_sessions, name="prompts", daemon=True)
        self._jobs_thread.start()
        self._prompts_thread.start()

    def handle(self, message: EngineMessage) -> None:
        """Act on one message from control; failures go back as `EngineFault` or `SessionEnded`."""
        match message:
            case LoadTrunk():
                self._submit(lambda: self._load(message), message.request)
            case SetLease():
                self._lease.renew(message.epoch, message.term, message.lease_end_boottime_ns)
                if self._dispatcher is not None:
                    self._dispatcher.set_authority(message.epoch, message.term)
            case ConnectHolder():
                try:
                    threading.Thread(
                        target=self._connect, args=(message,), name="connect", daemon=True
                    ).start()
                except RuntimeError as error:  # no memory or no right to another thread
                    self._channel.send(HolderLost(message.node_id, "unreachable", as_sentence(str(error))))
            case LoadOwnShard():
                with self._own_lock:
                    self._own_wanted = message
                try:
                    threading.Thread(
                        target=self._load_own, args=(message,), name="own experts", daemon=True
                    ).start()
                except RuntimeError as error:
                    self._channel.send(fault_of(message.request, EngineFailed(str(error)), "shard_unusable"))
            case RemoveHolder():
                self._remove_holder(message)
            case Generate():
                self._start_session(message)
            case CancelSession():
                self._cancel_session(message.session)
            case Tokenize():
                self._submit(lambda: self._tokenize(message), message.request)
            case EvaluateLogits():
                self._submit(lambda: self._evaluate(message), message.request)
            case QueryStatistics():
                self._channel.send(EngineStatistics(message.request, json.dumps(self._statistics())))
            case _:
                raise LocalProtocolError(f"a backbone engine has no use for {type(message).__name__}")

    def close(self) -> None:
        """Abort what runs, end the threads, close connections. Waits a bounded time."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()  # what has not begun is not begun any more
        with contextlib.suppress(queue.Empty):
            while True:
                self._prompts.get_nowait()
        if self._dispatcher is not None:
            self._dispatcher.abort()
        if self._sessions is not None:
            self._sessions.close()
        with contextlib.suppress(queue.Full):
            self._prompts.put_nowait(None)
        self._prompts_thread.join(5.0)
        with contextlib.suppress(queue.Full):
            self._jobs.put_nowait(None)
        self._jobs_thread.join(5.0)
        if self._audit is not None:
            self._audit.close()

    # -- the jobs' thread -------------------------------------------------------------------------

    def _submit(self, job: Callable[[], None], request: int) -> None:
        try:
            self._jobs.put_nowait(_Job(job, request))
        except queue.Full:
            fault = EngineFault(request, "busy", "too many jobs are waiting", KvasirError.exit_code)
            self._channel.send(fault)

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.run()
            except Exception as error:
                # The thread goes on: an engine whose decode thread is dead would never answer again.
                log.exception("job_crashed")
                detail = as_sentence(f"{type(error).__name__}: {error}")
                self._channel.send(EngineFault(job.request, "internal", detail, KvasirError.exit_code))
            if self._dispatcher is not None:
                with self._exclusive:
                    self._dispatcher.settle()  # only now: whoever asked has its answer already
        if self._sessions is not None and not self._sessions.close():
            return  # llama.cpp still uses all of it; the process ends soon
        if self._trunk is not None:
            self._trunk.close()
        if self._hook is not None:
            self._hook.close()
        if self._dispatcher is not None:
            self._dispatcher.close()

    def _load(self, message: LoadTrunk) -> None:
        dispatcher = hook = audit = None
        try:
            if self._trunk is not None:
                raise LocalProtocolError("an engine loads one trunk in its life")
            if message.hooked and message.rpc is not None:
                raise LocalProtocolError("a hooked trunk has no use for an RPC server")
            manifest = read_manifest(Path(message.manifest_path))
            settings = TrunkSettings(
                n_ctx=message.n_ctx,
                n_ubatch=message.n_ubatch,
                n_threads=message.threads,
                kv_type=message.kv_type,
                device=message.device,
                n_sequences=min(message.sessions, message.n_ubatch),
            )
            experts: ExpertSource | None = None
            if message.rpc is not None:
                experts = RpcExperts(Path(message.rpc.library_path), message.rpc.host, message.rpc.port)
            if message.hooked:
                experts = hook = ExpertHook(
                    self._on_layer, bulk_layers(manifest.moe_layers) if message.partial_sums else ()
                )
                if message.audit_path is not None:
                    from kvasir_node.backbone.row_audit import RowAudit  # 4 MB, only for who audits

                    whole_model = ExpertBytes(Path(message.audit_path), manifest)
                    audit = RowAudit(
                        manifest,
                        whole_model.read,
                        self._on_verdict,
                        self._on_evidence,
                        self._on_unaccountable,
                    )
                dispatcher = Dispatcher(
                    load_native_library(),
                    manifest,
                    hook.programs,
                    on_holder_lost=self._on_holder_lost,
                    on_answers_timed=self._on_answers_timed,
                    compact_activations=message.compact_activations,
                    audit=audit,
                )
            trunk = Trunk(Path(message.backbone_path), settings, experts)
        except (KvasirError, ProtocolError, OSError, MemoryError) as error:
            if hook is not None:
                hook.close()
            if audit is not None:
                audit.close()
            self._channel.send(fault_of(message.request, error, "trunk_unusable"))
            return
        self._coverage_patience_ns = message.coverage_patience_ns
        self._manifest, self._hook, self._dispatcher, self._trunk = manifest, hook, dispatcher, trunk
        self._audit = audit
        decode_token_ns = 0
        if dispatcher is not None:
            dispatcher.set_authority(*self._lease.newest)  # a lease may have come before the trunk
            decode_token_ns = self._measure_token(trunk)
        options = SessionOptions(
            n_cells=trunk.n_ctx,
            n_ubatch=message.n_ubatch,
            sessions_per_context=trunk.settings.n_sequences,
            coverage_patience=Duration(message.coverage_patience_ns),
        )
        self._reports = SessionReports(self._channel.send, trunk, self._count)
        self._sessions = Sessions(
            [SessionContext(trunk, dispatcher, self._exclusive)],
            options,
            self._reports,
            check_authority=self._lease.check,
        )
        self._channel.send(
            TrunkLoaded(
                message.request,
                trunk.n_layer,
                trunk.n_vocab,
                trunk.n_ctx,
                trunk.has_tokenizer,
                resident_bytes(),
                decode_token_ns,
                tuple(sorted({each.digest() for each in self._programs.values()})),
            )
        )

    def _measure_token(self, trunk: Trunk) -> int:
        self._is_measuring = True
        try:
            return measure_token_ns(trunk)
        finally:
            self._is_measuring = False
            self._n_calls_measuring = self._hook_calls()

    def _on_layer(self, call: LayerCall) -> None:
        if self._is_measuring:
            assert self._hook is not None
            self._programs[call.layer] = self._hook.programs[call.program_index]
            fill_with_zeros(call)
            return
        assert self._dispatcher is not None
        started = time.monotonic_ns()
        self._dispatcher(call)
        self._layers_ns += time.monotonic_ns() - started
        if self._recorder is not None:
            self._recorder.note(call)

    def _on_holder_lost(self, node_id: NodeId, code: str, reason: str) -> None:
        self._channel.send(HolderLost(node_id, code, as_sentence(reason)))

    def _on_answers_timed(self, node_id: NodeId, mean_ns: int) -> None:
        self._channel.send(AnswersTimed(node_id, mean_ns))

    def _on_verdict(self, verdict: Verdict) -> None:
        """The audit has found a node out. From any thread."""
        n_rows_asked = self._rows_asked(verdict.node_id)
        reason = as_sentence(verdict.reason)
        log.warning("holder_judged", node=verdict.node_id, verdict=verdict.word, reason=reason)
        self._channel.send(
            HolderJudged(
                verdict.node_id,
                verdict.word,
                reason,
                verdict.n_rows,
                verdict.n_foreign,
                n_rows_asked,
                verdict.certificate,
            )
        )
        if verdict.word == "quarantined":
            self._give_up(verdict.node_id, verdict.word, reason)

    def _on_evidence(self, node_id: NodeId, claim_digest: bytes, evidence: bytes) -> None:
        """What was found of a node can be shown to others. From any thread."""
        self._channel.send(HolderEvidenced(node_id, claim_digest, evidence))

    def _on_unaccountable(self, node_id: NodeId, code: str, reason: str) -> None:
        """A node does not stand for what it answered. From any thread."""
        log.warning("holder_unaccountable", node=node_id, code=code, reason=reason)
        self._give_up(node_id, code, as_sentence(reason))

    def _give_up(self, node_id: NodeId, code: str, reason: str) -> None:
        """Ask this node for nothing more, and say so."""
        if self._dispatcher is not None:
            self._dispatcher.remove_holder(node_id, reason)
            self._channel.send(HolderLost(node_id, code, reason))
            self._settle_soon()

    def _rows_asked(self, node_id: NodeId) -> int:
        """Of a node, in examinations and for texts."""
        asked = self._dispatcher.rows_asked(node_id) if self._dispatcher is not None else 0
        return asked + (self._audit.rows_examined().get(node_id, 0) if self._audit is not None else 0)

    def _examine(self, holder: RemoteHolder, message: ConnectHolder, shard: ShardSet) -> None:
        """Look at rows of a new connection before it counts. Raises `RemoteProtocolError` with the verdict
        for its code when its node is not to serve this shard.
        """
        if self._audit is None or self._manifest is None:
            return
        from kvasir_node.certification.claimed_arithmetic import Claim

        claim = Claim(message.adds_in_f32, message.activation, message.claim_digest)
        self._audit.take_claim(message.node_id, claim)
        verdict = self._audit.examine(holder, shard, self._programs, self._lease.check())
        if verdict is None:
            return
        sensitive = set(output_layers(self._manifest.moe_layers)) & set(shard.layers)
        if verdict.word == "quarantined" or sensitive:
            raise RemoteProtocolError(verdict.reason, verdict.word)

    def _start_session(self, message: Generate) -> None:
        deadline = Instant(boottime_ns() + message.deadline_ms * 1_000_000)
        with self._opening_lock:
            self._opening.add(message.session)
        try:
            self._prompts.put_nowait((message, deadline))
        except queue.Full:
            with self._opening_lock:
                self._opening.discard(message.session)
            self._refuse_session(message.session, "busy", "too many sessions wait")

    def _open_sessions(self) -> None:
        while (each := self._prompts.get()) is not None:
            self._open_session(*each)

    def _open_session(self, message: Generate, deadline: Instant) -> None:
        """Hand a session over; what becomes of it `SessionReports` tells."""
        try:
            trunk = self._ready_trunk()
            prompt = message.token_ids if message.prompt is None else tuple(trunk.tokenize(message.prompt))
            with self._opening_lock:
                if message.session not in self._opening:
                    return  # it was cancelled
                self._opening.remove(message.session)
                self._hand_over(message, prompt, deadline)
        except (KvasirError, ProtocolError) as error:
            code = error.code if isinstance(error, KvasirError) else "internal"
            self._refuse_session(message.session, code, str(error))
        except Exception as error:
            log.exception("session_crashed")
            self._refuse_session(message.session, "internal", f"{type(error).__name__}: {error}")

    def _hand_over(self, message: Generate, prompt: tuple[int, ...], deadline: Instant) -> None:
        assert self._sessions is not None
        assert self._reports is not None
        if message.n_emitted and message.n_emitted >= len(prompt):
            raise UsageError("a session has a prompt before what was emitted of it")
        ends = frozenset(message.end_tokens)
        opened = Open(
            message.session, message.client, prompt, message.n_tokens, ends, deadline, message.n_emitted
        )
        self._reports.begin(message.session, len(prompt) - message.n_emitted)
        try:
            has_place = self._sessions.open(WantedSession(opened, message.sampling, message.n_top))
        except BaseException:
            self._reports.forget(message.session)
            raise
        if has_place:
            self._channel.send(SessionOpened(message.session))

    def _cancel_session(self, session: SessionId) -> None:
        with self._opening_lock:
            is_opening = session in self._opening
            self._opening.discard(session)
        if is_opening:
            self._channel.send(SessionEnded(session, "cancelled", "", "", 0, 0, 0, 0, 0, 0))
        elif self._sessions is not None:
            self._sessions.cancel(session)

    def _refuse_session(self, session: SessionId, code: str, detail: str) -> None:
        self._channel.send(SessionEnded(session, "failed", code, as_sentence(detail), 0, 0, 0, 0, 0, 0))

    def _await_holders(self) -> bool:
        """Whether every expert has a holder before long, as the control process replaces a dead one."""
        if self._dispatcher is None or not self._dispatcher.await_coverage(self._coverage_patience_ns):
            return False
        self._lease.check()
        return True

    def _tokenize(self, message: Tokenize) -> None:
        try:
            token_ids = tuple(self._ready_trunk().tokenize(message.prompt))
        except (KvasirError, ProtocolError) as error:
            self._channel.send(fault_of(message.request, error, "not_tokenized"))
            return
        self._channel.send(Tokenized(message.request, token_ids))

    def _evaluate(self, message: EvaluateLogits) -> None:
        """Decode the tokens chunk by chunk and write F32 logits [n_tokens, n_vocab] as a .npy file.

        Sessions stand still meanwhile.
        """
        with self._exclusive:
            self._evaluate_exclusively(message)

    def _evaluate_exclusively(self, message: EvaluateLogits) -> None:
        recorder = None if message.traces_path is None else TraceRecorder()
        beside: Trunk | None = None
        try:
            trunk = self._ready_trunk()
            n_tokens = len(message.token_ids)
            if sum(message.chunk_sizes) != n_tokens:
                raise LocalProtocolError("chunk sizes do not add up to the tokens")
            if recorder is not None and n_tokens > TRACED_POSITIONS_MAX:
                raise UsageError(f"at most {TRACED_POSITIONS_MAX} positions are looked into at once")
            assert self._sessions is not None
            if recorder is not None or message.n_ubatch is not None or self._sessions.n_sessions:
                # The context of sessions stays as it is, and nobody's looking on slows it down.
                n_ctx, n_ubatch = -(-n_tokens // 256) * 256, message.n_ubatch or trunk.settings.n_ubatch
                watch = None if recorder is None else recorder.watch
                trunk = beside = trunk.beside(n_ctx, n_ubatch, watch)
            self._recorder = recorder
            trunk.clear()
            calls_before, retried_before = self._hook_calls(), self._rows_retried()
            logits = create_logits(Path(message.output_path), n_tokens, trunk.n_vocab)
            chunk_ns, layers_ns = [], []
            start = 0
            for size in message.chunk_sizes:
                self._lease.check()
                layers_before_ns = self._layers_ns
                started = time.monotonic_ns()
                tokens = message.token_ids[start : start + size]
                decode_patiently(trunk, tokens, self._await_holders, all_logits=True)
                chunk_ns.append(time.monotonic_ns() - started)
                layers_ns.append(self._layers_ns - layers_before_ns)
                for index in range(size):
                    logits[start + index] = trunk.logits(index)
                start += size
            logits.flush()
            if recorder is not None:
                recorder.require_seen()
                write_traces(Path(str(message.traces_path)), recorder.traces(n_tokens))
        except (KvasirError, ProtocolError, DecodeAborted, OSError) as error:
            self._channel.send(fault_of(message.request, error, "evaluation_failed"))
            return
        finally:
            self._recorder = None
            if beside is not None:
                beside.close()
            elif self._trunk is not None:
                self._trunk.clear()  # no session knows of what was evaluated
        self._channel.send(
            LogitsEvaluated(
                message.request,
                len(message.token_ids),
                self._hook_calls() - calls_before,
                self._rows_retried() - retried_before,
                tuple(chunk_ns),
                tuple(layers_ns),
            )
        )

    # -- holders -----------------------------------------------------------------------------------

    def _connect(self, message: ConnectHolder) -> None:
        dispatcher, manifest = self._dispatcher, self._manifest
        try:
            if dispatcher is None or manifest is None:
                raise LocalProtocolError("no trunk is loaded that needs holders")
            shard, primary = ShardSet.decode(message.shard), ShardSet.decode(message.primary)
            epoch, term = self._lease.check()
            connection = connect_pinned(
                self._credentials, message.host, message.port, message.token, message.certificate
            )
            opening = Opening(epoch, term, message.proof, manifest.digest())
            holder = open_remote_holder(message.node_id, connection, opening.encode())
            try:
                if self._audit is not None:
                    key, binding = key_and_binding(message.certificate)
                    holder.log = self._audit.log_of(message.node_id, key, binding, message.claim_digest)
                self._examine(holder, message, shard)
                dispatcher.add_holder(holder, shard, primary)
            except BaseException:
                holder.close()
                raise
            self._note_holders()
        except (OSError, ProtocolError, KvasirError) as error:
            code = error.code if isinstance(error, RemoteProtocolError) else "unreachable"
            self._channel.send(HolderLost(message.node_id, code, as_sentence(in_words(error))))
            return
        self._settle_soon()  # its worker keeps what an older connection of it needs until that one ends
        self._channel.send(HolderConnected(message.node_id))

    def _remove_holder(self, message: RemoveHolder) -> None:
        if self._dispatcher is None:
            return
        with self._own_lock:
            if self._own_wanted is not None and self._own_wanted.node_id == message.node_id:
                self._own = self._own_wanted = None
            self._dispatcher.remove_holder(message.node_id, message.reason)
        self._settle_soon()

    def _load_own(self, message: LoadOwnShard) -> None:
        """Hold a shard in this process; what is held meanwhile serves until it is replaced."""
        kernel: GgmlCpuKernel | None = None
        try:
            dispatcher, manifest = self._dispatcher, self._manifest
            if dispatcher is None or manifest is None:
                raise LocalProtocolError("no trunk is loaded that needs experts")
            shard, primary = ShardSet.decode(message.shard), ShardSet.decode(message.primary)
            own = self._own
            if own is None or (own.shard, own.source_path) != (shard, message.source_path):
                with ExpertBytes(Path(message.source_path), manifest) as source:
                    kernel = GgmlCpuKernel(manifest, shard, source.read, threads=message.threads)
                holder = LocalHolder(message.node_id, kernel)
                own = _OwnExperts(holder, shard, message.source_path, kernel.memory_bytes)
            with self._own_lock:
                if self._own_wanted is not message:
                    raise LocalProtocolError("these experts are not to be held any more")
                dispatcher.add_holder(own.holder, shard, primary)
                self._own, kernel = own, None
            self._note_holders()
        except (KvasirError, ProtocolError, OSError, MemoryError) as error:
            if kernel is not None:
                kernel.close()
            self._channel.send(fault_of(message.request, error, "shard_unusable"))
            return
        self._settle_soon()
        self._channel.send(OwnShardLoaded(message.request, own.memory_bytes, shard.digest()))

    def _note_holders(self) -> None:
        """Sessions that wait for a holder may have one now."""
        if self._sessions is not None:
            self._sessions.note_holders()

    def _settle_soon(self) -> None:
        """Have what is needed no more closed; where jobs wait, that is done after them."""
        if self._jobs.empty():
            with contextlib.suppress(queue.Full):
                self._jobs.put_nowait(_Job(lambda: None))

    # -- what is going on --------------------------------------------------------------------------

    def _ready_trunk(self) -> Trunk:
        if self._trunk is None:
            raise NotReady("no trunk is loaded")
        return self._trunk

    def _count(self) -> Counters:
        return Counters(self._hook_calls(), self._rows_retried())

    def _hook_calls(self) -> int:
        return self._hook.calls - self._n_calls_measuring if self._hook is not None else 0

    def _rows_retried(self) -> int:
        return self._dispatcher.statistics().rows_retried if self._dispatcher is not None else 0

    def _statistics(self) -> dict[str, object]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        values: dict[str, object] = {
            "cpu_ns": int((usage.ru_utime + usage.ru_stime) * 1e9),
            "resident_bytes": resident_bytes(),
            "hook_calls": self._hook_calls(),
            "experts_missing_total": self._hook.rows_unfilled_total if self._hook is not None else 0,
            "jobs_waiting": self._jobs.qsize(),
            "sessions": self._sessions.n_sessions if self._sessions is not None else 0,
            "trunk_device": self._trunk.device_name if self._trunk is not None else "",
            "own_experts": len(own.shard) if (own := self._own) is not None else 0,
        }
        if self._dispatcher is not None:
            dispatched = dataclasses.asdict(self._dispatcher.statistics())
            if self._audit is not None:
                for node_id, n_rows in self._audit.rows_examined().items():
                    asked = dispatched["rows_by_holder"]
                    asked[node_id] = asked.get(node_id, 0) + n_rows
                values["audit"] = self._audit.statistics()
            values["dispatch"] = dispatched
            values["missing_experts"] = sum(
                len(experts) for experts in self._dispatcher.missing_experts().values()
            )
        return values


def resident_bytes() -> int:
    """This process's resident set in bytes, as the kernel counts it now."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
