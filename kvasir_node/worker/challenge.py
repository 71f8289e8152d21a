"""An auditor's challenge: rows that nobody has seen go to another node's worker engine and are judged.

They travel as a backbone's do, in batches of several sizes, to experts that the node holds; what comes back
is compared row by row with what the referee computes from the model's own bytes. Nothing is verified that
would not have shown sums in F16: they are emulated on the same rows, and have to be found out. Whatever is
late, refused or malformed verifies nothing. It refuses to know who the auditors are.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.holder import NO_PAIRS, RemoteHolder, Request, open_remote_holder
from kvasir_node.certification.row_referee import RowReferee
from kvasir_node.engine.tls import EngineCredentials, connect_pinned
from kvasir_node.kernels.accumulators import F16_SUMS
from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS, ACTIVATION_ROUNDINGS
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.kernels.speed import program_like
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.manifest_file import read_manifest
from kvasir_node.system_words import in_words
from kvasir_proto import dispatch
from kvasir_proto.audit.finding import Finding
from kvasir_proto.audit.verdict import word_of
from kvasir_proto.dispatch import FrameKind, Opening
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.limits import as_sentence
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.messages.engine import ChallengeHolder, HolderChallenged
from kvasir_proto.program import ExpertProgram
from kvasir_proto.tolerance import flips_max

Float32Array = npt.NDArray[np.float32]
Outcome: TypeAlias = Literal["verified", "unfit", "quarantined", "inconclusive"]
Read: TypeAlias = Callable[[str, int], bytes | bytearray | memoryview]

BATCHES: Final = (64, *(8,) * 6, *(1,) * 16)
"""Rows of each call to an expert: kernels may compute differently at each size. Not 32 and 512 rows: they
cost too much to send for what they would add."""

EXPERTS_MAX: Final = 4
"""Experts that one challenge asks about."""
BUDGET_S: Final = 0.4
"""No other expert is begun after so much processor time: wide ones take 0.7 s each."""
ANSWER_TIMEOUT_S: Final = 10.0
"""For one call: a slow node takes seconds for 64 rows."""
_HEAVY_ROWS: Final = 4
_EMULATED_ROWS: Final = 2


class _Conversation:
    """One expert after the other is asked; all that is said goes into the evidence."""

    def __init__(self, holder: RemoteHolder, message: ChallengeHolder, manifest: ModelManifest) -> None:
        self._holder = holder
        self._message = message
        self._width = manifest.n_embd
        self._programs: list[ExpertProgram] = []
        self._n_asked = 0
        self.evidence = hashlib.sha256()

    def ask(self, layer: int, expert: int, program: ExpertProgram, rows: Float32Array) -> Float32Array:
        """The node's answers to these rows, [rows, width]. Raises `OSError` or `RemoteProtocolError`."""
        index = self._program(program)
        n_row = len(rows)
        tables = np.concatenate([np.arange(n_row), np.full(n_row, expert)]).astype(np.int32)
        frame = bytearray(dispatch.HEADER_BYTES)
        dispatch.pack_dispatch_into(
            frame,
            request_id=self._next_id(),
            epoch=self._message.epoch,
            term=self._message.term,
            layer=layer,
            program=index,
            n_rows=n_row,
            n_pairs=n_row,
            n_embd_in=self._width,
        )
        frame += tables.tobytes() + np.ascontiguousarray(rows, np.float32).tobytes()
        payload = self._exchange(bytes(frame), n_row)
        answer, digest = payload[: -dispatch.DIGEST_BYTES], payload[-dispatch.DIGEST_BYTES :]
        if digest != dispatch.reply_digest(bytes(frame), answer):
            raise RemoteProtocolError("the digest behind the rows is of something else", "malformed")
        return np.frombuffer(answer, np.float32).reshape(n_row, self._width)

    def _program(self, program: ExpertProgram) -> int:
        if program not in self._programs:
            self._programs.append(program)
            index = len(self._programs) - 1
            frame = dispatch.pack_plain(FrameKind.PROGRAM, self._next_id(), program.encode(), program=index)
            self._exchange(frame, 0)
        return self._programs.index(program)

    def _next_id(self) -> int:
        self._n_asked += 1
        return self._n_asked

    def _exchange(self, frame: bytes, n_row: int) -> bytes:
        """Send a frame and wait for its answer: the payload."""
        now_ns = time.monotonic_ns()
        deadline_ns = now_ns + round(ANSWER_TIMEOUT_S * 1e9)
        request = Request(
            request_id=self._n_asked,
            unsent=memoryview(frame),
            indices=NO_PAIRS,
            start=0,
            n_pairs=n_row,
            n_results=n_row,
            n_embd_out=self._width,
            submitted_ns=now_ns,
            deadline_ns=deadline_ns,
        )
        self._holder.submit(request)
        answered: Request | None = None
        while answered is None:
            if time.monotonic_ns() > deadline_ns:
                raise TimeoutError(f"no answer in {ANSWER_TIMEOUT_S:g} s")
            self._holder.send_pending()
            answered = self._holder.receive_reply()
        size = dispatch.reply_payload_bytes(n_row, self._width)
        payload = ctypes.string_at(self._holder.payload_address, size)
        self.evidence.update(frame + payload)
        return payload


def challenge(message: ChallengeHolder, credentials: EngineCredentials) -> HolderChallenged:
    """Challenge a node; what cannot be done or judged is inconclusive, with its reason."""
    findings: list[Finding] = []
    evidence = hashlib.sha256()
    outcome: Outcome
    try:
        manifest = read_manifest(Path(message.manifest_path))
        shard = ShardSet.decode(message.shard)
        if not 1 <= len(shard) <= EXPERTS_MAX:
            raise RemoteProtocolError(f"{len(shard)} experts for one challenge", "out_of_bounds")
        connection = connect_pinned(
            credentials, message.host, message.port, message.token, message.certificate
        )
        with contextlib.closing(_open(connection, message, manifest)) as holder:
            conversation = _Conversation(holder, message, manifest)
            evidence = conversation.evidence
            with ExpertSource(Path(message.source_path), manifest) as source:
                outcome, reason = _judge(message, manifest, shard, source.read, conversation, findings)
    except (OSError, RemoteProtocolError) as error:
        outcome, reason = "inconclusive", in_words(error)
    return HolderChallenged(
        request=message.request,
        outcome=outcome,
        reason=as_sentence(reason),
        n_rows=len(findings),
        n_flipped=sum(each.outcome == "flipped" for each in findings),
        evidence=evidence.digest(),
    )


def _open(connection: ssl.SSLSocket, message: ChallengeHolder, manifest: ModelManifest) -> RemoteHolder:
    opening = Opening(message.epoch, message.term, message.proof, manifest.digest())
    return open_remote_holder(message.node_id, connection, opening.encode())


def _judge(
    message: ChallengeHolder,
    manifest: ModelManifest,
    shard: ShardSet,
    read: Read,
    conversation: _Conversation,
    findings: list[Finding],
) -> tuple[Outcome, str]:
    """What the node's answers make of it, and why."""
    activation = _kernels_name(message.activation)
    draws = np.random.default_rng(message.seed)
    began_s, n_asked = time.thread_time(), 0
    for layer, first, end in shard.ranges:
        program = program_like(manifest, layer)
        for expert in range(first, end):
            if n_asked and time.thread_time() - began_s > BUDGET_S:
                break
            n_asked += 1
            rows = challenging_rows(sum(BATCHES), manifest.n_embd, draws)
            ends = np.cumsum(BATCHES)
            answers = np.concatenate(
                [
                    conversation.ask(layer, expert, program, rows[upto - n_row : upto])
                    for n_row, upto in zip(BATCHES, ends.tolist(), strict=True)
                ]
            )
            with contextlib.closing(RowReferee(manifest, read)) as referee:
                found = referee.judge(message.node_id, layer, program, expert, rows, answers, activation)
                findings += found
                outcome, reason = _outcome_of(found, manifest, activation)
                if outcome != "verified":
                    return outcome, f"layer {layer}, expert {expert}: {reason}"
                few = rows[:_EMULATED_ROWS]
                short = _sums_in_f16(manifest, layer, expert, program, few, read, activation)
                judged = referee.judge(message.node_id, layer, program, expert, few, short, activation)
            if any(each.outcome != "foreign" for each in judged):
                return "inconclusive", f"layer {layer}, expert {expert}: sums in F16 would not have shown"
    return "verified", f"{len(findings)} rows, experts asked: {n_asked}"


def _outcome_of(
    found: Sequence[Finding], manifest: ModelManifest, activation: str | None
) -> tuple[Outcome, str]:
    """What the rows of one expert show."""
    if any(each.outcome == "void" for each in found):
        return "inconclusive", "the referee cannot compute it"
    foreign = [each for each in found if each.outcome == "foreign"]
    if foreign:
        worst = max(each.residual for each in foreign)
        return word_of(foreign), f"{len(foreign)} of {len(found)} rows are wrong, by up to {worst:.1e}"
    n_flipped = sum(each.outcome == "flipped" for each in found)
    down = manifest.tensor(f"blk.{found[0].layer}.ffn_down_exps.weight")
    name = (activation or ACTIVATION_FORMATS[down.type.name]).upper()
    if n_flipped and n_flipped > flips_max(name, len(found), down.shape[0]):
        return "unfit", f"{n_flipped} of {len(found)} rows have a value that was rounded the other way"
    return "verified", ""


def challenging_rows(n_row: int, width: int, draws: np.random.Generator) -> Float32Array:
    """Rows as large as what a norm gives; every fourth has a few values that stand out, as real rows do."""
    rows = draws.standard_normal((n_row, width))
    heavy = rows[::_HEAVY_ROWS]
    heavy *= np.where(draws.random(heavy.shape) < 0.01, 10.0, 1.0)
    return rows.astype(np.float32)


def _sums_in_f16(
    manifest: ModelManifest,
    layer: int,
    expert: int,
    program: ExpertProgram,
    rows: Float32Array,
    read: Read,
    activation: str | None,
) -> Float32Array:
    """What a kernel would answer that adds in F16."""
    shard = ShardSet.from_ranges([(layer, expert, expert + 1)])
    kernel = ReferenceKernel(manifest, shard, read, Arithmetic.AS_GGML, F16_SUMS, activation)
    with contextlib.closing(kernel):
        index = kernel.add_program(program)
        places = np.arange(len(rows), dtype=np.int32)
        experts = np.full(len(rows), expert, np.int32)
        return np.asarray(kernel.compute_rows(layer, index, rows, places, experts), np.float32)


def _kernels_name(activation: str) -> str | None:
    """The kernels' name of a format as records have it; None where rows are to be as in the reference class.

    Raises `RemoteProtocolError` for one that nobody knows.
    """
    if not activation:
        return None
    found = next((each for each in ACTIVATION_ROUNDINGS if each.upper() == activation.upper()), None)
    if found is None:
        raise RemoteProtocolError(f"rows in {activation!r} cannot be computed here", "unknown_format")
    return found
