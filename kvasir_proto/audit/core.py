"""The audit of all nodes that answer this one: findings in, verdicts out.

It keeps for each node the evidence of its rows, and says once when that is enough: the node is unfit for what
matters, or quarantined. Who is unfit already, or said itself that it adds in less than F32, is judged by
whether its rows are right at all. Nothing but another certificate clears a node: time does not, good rows do
not, and neither does a request that was asked before. It knows no rows, sends nothing, and reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from kvasir_proto.audit.drift import DriftAlarm
from kvasir_proto.audit.finding import Finding
from kvasir_proto.audit.sampling import Countdowns, Sampling
from kvasir_proto.audit.sequential import SequentialTest
from kvasir_proto.audit.verdict import Verdict, is_wrong_for_short_sums, word_of
from kvasir_proto.effects import Now
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant
from kvasir_proto.limits import EXPERTS_MAX, AuditVerdict
from kvasir_proto.messages import Message

if TYPE_CHECKING:
    import random

NODES_MAX: Final = 1024
"""Nodes that are remembered; beyond, those go first that there is no verdict of, then the oldest verdicts."""
FOREIGN_KEPT: Final = 8
"""Foreign rows that a verdict's word rests on: the last ones."""
REQUESTS_KEPT: Final = 1024
"""Requests of a node that are known again. A prompt that is sent twice gives the same rows: a row that
flipped once flips again, which says nothing new."""


@dataclass(frozen=True, slots=True)
class NoteFindings:
    """Rows that were looked at, in the order in which they were."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class NoteClaim:
    """A node's own word on its sums. With another `certificate` than before it begins anew, in probation:
    that is how a verdict ends, and the only way.
    """

    node_id: NodeId
    adds_in_f32: bool
    certificate: bytes = b""


Request: TypeAlias = NoteFindings | NoteClaim


@dataclass(frozen=True, slots=True)
class AuditStanding:
    """What is known of one node; a snapshot."""

    node_id: NodeId
    n_rows: int
    n_flipped: int
    n_foreign: int
    evidence: float
    drift: float
    verdict: Verdict | None


@dataclass(slots=True)
class _Subject:
    """What has been seen of one node."""

    certificate: bytes = b""
    adds_in_f32: bool = True
    test: SequentialTest = field(default_factory=SequentialTest)
    drift: DriftAlarm = field(default_factory=DriftAlarm)
    foreign: deque[Finding] = field(default_factory=lambda: deque(maxlen=FOREIGN_KEPT))
    requests: dict[bytes, None] = field(default_factory=dict)
    n_rows: int = 0
    n_flipped: int = 0
    n_foreign: int = 0
    verdict: Verdict | None = None

    @property
    def is_short_of_f32(self) -> bool:
        return not self.adds_in_f32 or self.verdict is not None


class AuditCore:
    """See the module. `draws` decides which rows are looked at: nobody else may know them."""

    def __init__(self, *, draws: random.Random, n_expert: int = EXPERTS_MAX) -> None:
        self._sampling = Sampling(draws, n_expert)
        self._subjects: dict[NodeId, _Subject] = {}
        self._effects: list[Verdict] = []

    # -- the five verbs --------------------------------------------------------------------------------------

    def receive(self, message: Message, sender: NodeId, now: Now) -> NoReturn:
        """The audit has no messages of its own. Raises `RemoteProtocolError`."""
        raise RemoteProtocolError(f"{message.kind} is not for the audit", "unexpected_message")

    def command(self, request: Request, now: Now) -> None:
        """Take one request."""
        match request:
            case NoteFindings(findings):
                for each in findings:
                    self._take(each)
            case NoteClaim():
                self._take_claim(request)

    def tick(self, now: Now) -> None:
        """Nothing here is a matter of time."""

    def next_deadline(self) -> Instant | None:
        """Never."""
        return None

    def drain(self) -> list[Verdict]:
        """Verdicts that are new, each once."""
        effects, self._effects = self._effects, []
        return effects

    # -- what is asked between them --------------------------------------------------------------------------

    def choose(self, node_id: NodeId, layer: int, experts: Sequence[int]) -> list[int]:
        """Which of the rows of an answer to look at, by place; `experts` says whose row each is."""
        return self._sampling.choose(node_id, layer, experts)

    def countdowns(self, node_id: NodeId, layer: int) -> Countdowns | None:
        """What `choose` has to be asked by, for who counts rows itself; None before it was asked once."""
        return self._sampling.countdowns(node_id, layer)

    def standing_of(self, node_id: NodeId) -> AuditStanding | None:
        """What is known of this node; None if nothing."""
        subject = self._subjects.get(node_id)
        if subject is None:
            return None
        return AuditStanding(
            node_id,
            subject.n_rows,
            subject.n_flipped,
            subject.n_foreign,
            subject.test.evidence,
            subject.drift.level,
            subject.verdict,
        )

    def standings(self) -> tuple[AuditStanding, ...]:
        """Of every node that is known, in order of ids."""
        known = (self.standing_of(each) for each in sorted(self._subjects))
        return tuple(each for each in known if each is not None)

    # -- inside ----------------------------------------------------------------------------------------------

    def _take(self, finding: Finding) -> None:
        subject = self._subject(finding.node_id)
        if finding.outcome == "void" or finding.request_digest in subject.requests:
            return
        subject.requests[finding.request_digest] = None
        if len(subject.requests) > REQUESTS_KEPT:
            del subject.requests[next(iter(subject.requests))]
        subject.n_rows += 1
        subject.n_flipped += finding.outcome == "flipped"
        judged = finding
        if subject.is_short_of_f32 and not is_wrong_for_short_sums(finding):
            judged = replace(finding, outcome="same", residual=0.0)
        if judged.outcome == "foreign":
            subject.n_foreign += 1
            subject.foreign.append(judged)
            self._sampling.scrutinise(judged.node_id, judged.layer, judged.expert)
        if subject.verdict is not None and subject.verdict.word == "quarantined":
            return
        subject.test.add(judged)
        subject.drift.add(judged)
        if subject.test.is_convinced or subject.drift.is_raised:
            self._judge(finding.node_id, subject)

    def _judge(self, node_id: NodeId, subject: _Subject) -> None:
        word: AuditVerdict = "quarantined" if subject.is_short_of_f32 else word_of(tuple(subject.foreign))
        if subject.test.is_convinced:
            reason = f"{subject.n_foreign} of {subject.n_rows} audited rows differ by what explains nothing"
            if not subject.n_foreign:
                reason = f"{subject.n_flipped} of {subject.n_rows} audited rows were rounded another way"
        else:
            reason = f"its rows come nearer to the gate: {subject.drift.level:.1f} over {subject.n_rows} rows"
        verdict = Verdict(node_id, word, reason, subject.n_rows, subject.n_foreign, subject.certificate)
        subject.verdict = verdict
        subject.test, subject.drift = SequentialTest(), DriftAlarm()
        subject.foreign.clear()
        self._effects.append(verdict)

    def _take_claim(self, claim: NoteClaim) -> None:
        subject = self._subject(claim.node_id)
        if claim.certificate != subject.certificate:
            self._subjects[claim.node_id] = subject = _Subject(certificate=claim.certificate)
            self._sampling.forget(claim.node_id)
        subject.adds_in_f32 = claim.adds_in_f32

    def _subject(self, node_id: NodeId) -> _Subject:
        subject = self._subjects.get(node_id)
        if subject is None:
            subject = self._subjects[node_id] = _Subject()
            if len(self._subjects) > NODES_MAX:
                others = (each for each in self._subjects if each != node_id)
                del self._subjects[min(others, key=lambda each: self._subjects[each].verdict is not None)]
        return subject
