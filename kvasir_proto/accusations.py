"""One node's part in judging others by evidence: what it was told, what it recomputes, when a swarm agrees.

An accusation binds nobody but its signer. Each elector that hears one of another elector, or of the backbone,
asks for the evidence, checks that the accused really gave those rows as it is certified now, has them
recomputed, and accuses it too if they are wrong. Once as many electors have recomputed it as could not all be
lying, two at least, it is the swarm's verdict. Whose accusation is not borne out is not listened to for a
while, then for longer; that changes nothing for the accused. Apart from `node_core`, which knows who is there
and what they claim, and from verdicts that hold (`verdicts_in_force`). It reads no clock and no weights.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.accusation import (
    ACCUSATION_LIFETIME,
    ACCUSATION_VERSION,
    REASON_LENGTH_MAX,
    Accusation,
    open_accusation,
    sign_accusation,
)
from kvasir_proto.audit.evidence import ROWS_NEEDED, open_evidence
from kvasir_proto.capability import has_expired
from kvasir_proto.effects import Notice, Now, Publish, Send
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.instants import Duration, Instant, after, seconds, sooner
from kvasir_proto.limits import AuditVerdict, as_sentence
from kvasir_proto.messages.certification import EvidenceReply, EvidenceRequest
from kvasir_proto.verdict_book import auditors_needed

ELECTORS_NEEDED_MIN: Final = 2
"""One elector alone is never a swarm, however small that is."""
ACCUSED_MAX: Final = 256
"""Nodes, each as certified then, of which accusations are held; those heard of first go first."""
SIGNERS_MAX: Final = 8
"""Accusations that are held of one: all electors' and the backbone's."""
EVIDENCE_KEPT: Final = 4
"""Pieces of evidence that others can ask for: 5 MiB."""
WAITING_MAX: Final = 64
"""Accusations that wait to be looked into; one more is not, until it is said again."""
ANSWER_TIMEOUT: Final[Duration] = seconds(30)
RECOMPUTE_TIMEOUT: Final[Duration] = seconds(120)
SPACING: Final[Duration] = seconds(1)
"""Between two that are looked into."""
REPEAT_INTERVAL: Final[Duration] = seconds(600)
"""How often this node says its accusations again, for those that were away."""
DISTRUST_FIRST: Final[Duration] = seconds(600)
DISTRUST_MAX: Final[Duration] = seconds(24 * 3600)
"""An accusation that was not borne out: its signer's others wait for 10 minutes, then 20, up to a day."""
DISTRUSTED_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class RecomputationDue:
    """Recompute the rows of this evidence, which the node gave as one with that claim, and tell with
    `Recomputed` what came of it.
    """

    node_id: NodeId
    evidence: bytes


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Rows were recomputed: `word` is what follows from them for the node, None where nothing does.

    `is_conclusive` is false where they could not be recomputed, which speaks against nobody.
    """

    node_id: NodeId
    word: AuditVerdict | None
    reason: str
    n_rows: int
    is_conclusive: bool = True


@dataclass(frozen=True, slots=True)
class Accuse:
    """This node's own audit has found that, and here is what shows it."""

    node_id: NodeId
    claim_digest: bytes
    word: AuditVerdict
    reason: str
    n_rows: int
    evidence: bytes


@dataclass(frozen=True, slots=True)
class Agreed:
    """What follows for a node as it is certified: by this node's own recomputation, or by its swarm's."""

    node_id: NodeId
    claim_digest: bytes
    word: AuditVerdict
    reason: str
    n_electors: int
    """Electors who recomputed it, where that is enough for the swarm; 0 where it binds this node alone."""


AccusationOutput: TypeAlias = Send | Publish | Notice | RecomputationDue | Agreed


class _Held(NamedTuple):
    accusation: Accusation
    data: bytes


class _Case(NamedTuple):
    """A node as it was certified."""

    node_id: NodeId
    claim_digest: bytes


@dataclass(slots=True)
class _Inquiry:
    """What is being looked into: whose word it is, and what of it there is by now."""

    case: _Case
    signer: NodeId
    digest: bytes
    until: Instant
    evidence: bytes = b""


@dataclass(slots=True)
class _Distrust:
    failures: int
    until: Instant


@dataclass(slots=True)
class _Heard:
    """Accusations of one node as it was certified, by signer, and what the swarm has made of them."""

    by_signer: dict[NodeId, _Held] = field(default_factory=dict)
    agreed: Agreed | None = None


class Accusations:
    """See the module. `claim_of` says what a node claims now, by digest; None where that is not known."""

    def __init__(
        self,
        private_key: Ed25519PrivateKey,
        swarm: SwarmDigest,
        model_digest: bytes,
        claim_of: Callable[[NodeId], bytes | None],
        *,
        may_lie: bool,
    ) -> None:
        """``may_lie``: whether electors may, as those of an open electorate."""
        self._private_key = private_key
        self._node_id = node_id_of(private_key.public_key().public_bytes_raw())
        self._swarm = swarm
        self._model_digest = model_digest
        self._claim_of = claim_of
        self._may_lie = may_lie
        self._electors: frozenset[NodeId] = frozenset()
        self._backbone: NodeId | None = None
        self._heard: OrderedDict[_Case, _Heard] = OrderedDict()
        self._evidence: OrderedDict[bytes, bytes] = OrderedDict()
        self._waiting: OrderedDict[tuple[_Case, NodeId], None] = OrderedDict()
        self._inquiry: _Inquiry | None = None
        self._free_at = Instant(0)
        self._distrusted: dict[NodeId, _Distrust] = {}
        self._repeat_at: Instant | None = None
        self._effects: list[AccusationOutput] = []

    # --- what is told ---------------------------------------------------------------------------------------

    def know_electors(self, electors: frozenset[NodeId]) -> None:
        """These vote; what they have said counts from now on, and what others have said does not."""
        if electors != self._electors:
            self._electors = electors
            for case in list(self._heard):
                self._count(case)

    def know_backbone(self, backbone: NodeId | None) -> None:
        """This node is the backbone: its accusations are looked into, whether it votes or not."""
        self._backbone = backbone

    @property
    def n_needed(self) -> int:
        """Electors who have to come to the same result."""
        return max(ELECTORS_NEEDED_MIN, auditors_needed(len(self._electors), may_lie=self._may_lie))

    def accuse(self, request: Accuse, now: Now) -> None:
        """Say what this node's own audit has found, and keep what shows it; if it does show it."""
        try:
            self._open(request.evidence, _Case(request.node_id, request.claim_digest), now)
        except RemoteProtocolError as error:
            fields = (("node", request.node_id), ("reason", error.reason))
            self._effects.append(Notice("accusation_not_made", fields))
            return
        digest = self._keep(request.evidence)
        self._sign(
            _Case(request.node_id, request.claim_digest),
            request.word,
            request.reason,
            request.n_rows,
            digest,
            now,
        )

    def own(self) -> tuple[bytes, ...]:
        """What this node has signed and still says, the newest `ACCUSED_MAX` at most; to be kept."""
        held = (heard.by_signer.get(self._node_id) for heard in self._heard.values())
        return tuple(each.data for each in held if each is not None)

    def restore(self, accusations: Iterable[bytes], now: Now) -> None:
        """Go on with what this node signed before it was started; what is not its own, or over, is not."""
        for data in accusations:
            try:
                accusation, signer = open_accusation(data, self._swarm, now.wall)
            except RemoteProtocolError:
                continue
            if signer == self._node_id:
                case = _Case(accusation.node_id, accusation.claim_digest)
                self._hold(case, signer, _Held(accusation, data))
                self._repeat_at = now.instant

    def take(self, data: bytes, now: Now) -> bool:
        """Hear a signed accusation, whoever brought it; whether it is one that counts for anything."""
        try:
            accusation, signer = open_accusation(data, self._swarm, now.wall)
        except RemoteProtocolError:
            return False
        if signer == self._node_id or not self._is_heard(signer):
            return False
        case = _Case(accusation.node_id, accusation.claim_digest)
        heard = self._hold(case, signer, _Held(accusation, data))
        if heard and self._is_to_look_into(case, signer):
            key = case, signer
            if key in self._waiting or len(self._waiting) < WAITING_MAX:
                self._waiting[key] = None
            self._look(now)
        return heard

    def receive(self, message: EvidenceRequest | EvidenceReply, sender: NodeId, now: Now) -> None:
        """Raises `RemoteProtocolError` for who may not ask, and for evidence that is none."""
        if isinstance(message, EvidenceRequest):
            if sender not in self._electors:
                raise RemoteProtocolError("only electors ask for evidence", "not_an_elector")
            data = self._evidence.get(message.evidence)
            if data is not None:
                self._effects.append(Send(sender, EvidenceReply(data)))
            return
        inquiry = self._inquiry
        if inquiry is None or inquiry.signer != sender or inquiry.evidence:
            return  # nobody waits for it any more
        if hashlib.sha256(message.evidence).digest() != inquiry.digest:
            self._refute(inquiry, "it sends other evidence than it named", now)
            raise RemoteProtocolError("other evidence than was asked for", "bad_evidence")
        try:
            self._open(message.evidence, inquiry.case, now)
        except RemoteProtocolError as error:
            self._refute(inquiry, str(error), now)
            raise
        inquiry.evidence = message.evidence
        inquiry.until = after(now.instant, RECOMPUTE_TIMEOUT)
        self._effects.append(RecomputationDue(inquiry.case.node_id, message.evidence))

    def finish(self, result: Recomputed, now: Now) -> None:
        """Say what came of a recomputation."""
        inquiry = self._inquiry
        if inquiry is None or inquiry.case.node_id != result.node_id or not inquiry.evidence:
            return  # given up long ago
        if not result.is_conclusive:
            self._end(now)
        elif result.word is None or result.n_rows < ROWS_NEEDED:
            self._refute(inquiry, result.reason or "the rows are right", now)
        else:
            digest = self._keep(inquiry.evidence)
            self._sign(inquiry.case, result.word, result.reason, result.n_rows, digest, now)
            self._end(now)

    def tick(self, now: Now) -> None:
        """Give up what nobody answers, look into the next one, and say again what is still so."""
        inquiry = self._inquiry
        if inquiry is not None and inquiry.until <= now.instant:
            fields = (("node", inquiry.case.node_id), ("accuser", inquiry.signer))
            self._effects.append(Notice("accusation_unanswered", fields))
            self._end(now)
        if self._repeat_at is not None and self._repeat_at <= now.instant:
            self._repeat(now)
        self._look(now)

    def next_deadline(self) -> Instant | None:
        """When to call `tick` next."""
        due = self._inquiry.until if self._inquiry is not None else self._free_at if self._waiting else None
        return sooner(due, self._repeat_at)

    def drain(self) -> list[AccusationOutput]:
        """What is to be done and told, in order, each once."""
        effects, self._effects = self._effects, []
        return effects

    # --- inside ---------------------------------------------------------------------------------------------

    def _open(self, evidence: bytes, case: _Case, now: Now) -> None:
        """Raises `RemoteProtocolError` for what is no evidence of this node's, as it is certified."""
        open_evidence(evidence, *case, swarm=self._swarm, model_digest=self._model_digest, now=now.wall)

    def _is_heard(self, signer: NodeId) -> bool:
        return signer in self._electors or signer == self._backbone

    def _is_to_look_into(self, case: _Case, signer: NodeId) -> bool:
        """Whether this node votes, is not the accused, has not said the same, and the accused is so now."""
        heard = self._heard.get(case)
        return (
            self._node_id in self._electors
            and case.node_id != self._node_id
            and heard is not None
            and self._node_id not in heard.by_signer
            and signer in heard.by_signer
            and self._claim_of(case.node_id) == case.claim_digest
        )

    def _look(self, now: Now) -> None:
        """Ask for the evidence of the next accusation, if nothing else is being looked into."""
        if self._inquiry is not None or now.instant < self._free_at:
            return
        while self._waiting:
            (case, signer), _ = self._waiting.popitem(last=False)
            distrust = self._distrusted.get(signer)
            if distrust is not None and distrust.until > now.instant:
                continue  # it is said again
            if self._is_to_look_into(case, signer):
                digest = self._heard[case].by_signer[signer].accusation.evidence
                self._inquiry = _Inquiry(case, signer, digest, after(now.instant, ANSWER_TIMEOUT))
                self._effects.append(Send(signer, EvidenceRequest(digest)))
                return

    def _refute(self, inquiry: _Inquiry, reason: str, now: Now) -> None:
        """What this signer says of the accused is not so: it is forgotten, and the signer believed less."""
        heard = self._heard.get(inquiry.case)
        if heard is not None:
            heard.by_signer.pop(inquiry.signer, None)
        before = self._distrusted.pop(inquiry.signer, None)
        failures = before.failures + 1 if before is not None else 1
        lasts = min(DISTRUST_MAX, DISTRUST_FIRST << min(failures - 1, 16))
        self._distrusted[inquiry.signer] = _Distrust(failures, after(now.instant, Duration(lasts)))
        while len(self._distrusted) > DISTRUSTED_MAX:
            del self._distrusted[min(self._distrusted, key=lambda each: (self._distrusted[each].until, each))]
        fields = (
            ("node", inquiry.case.node_id),
            ("accuser", inquiry.signer),
            ("reason", as_sentence(reason)),
        )
        self._effects.append(Notice("accusation_refuted", fields))
        self._end(now)

    def _end(self, now: Now) -> None:
        self._inquiry = None
        self._free_at = after(now.instant, SPACING)
        self._look(now)

    def _keep(self, evidence: bytes) -> bytes:
        digest = hashlib.sha256(evidence).digest()
        self._evidence.pop(digest, None)
        self._evidence[digest] = evidence
        while len(self._evidence) > EVIDENCE_KEPT:
            self._evidence.popitem(last=False)
        return digest

    def _sign(
        self, case: _Case, word: AuditVerdict, reason: str, n_rows: int, digest: bytes, now: Now
    ) -> None:
        reason = as_sentence(reason)[:REASON_LENGTH_MAX]
        accusation = Accusation(
            version=ACCUSATION_VERSION,
            node_id=case.node_id,
            claim_digest=case.claim_digest,
            word=word,
            reason=reason,
            n_rows=n_rows,
            evidence=digest,
            issued=now.wall,
            expires=after(now.wall, ACCUSATION_LIFETIME),
        )
        data = sign_accusation(accusation, self._private_key, self._swarm)
        self._effects.append(Publish("records", data))
        self._effects.append(Notice("node_accused", (("node", case.node_id), ("verdict", word))))
        self._effects.append(Agreed(case.node_id, case.claim_digest, word, reason, 0))
        self._hold(case, self._node_id, _Held(accusation, data))
        if self._repeat_at is None:
            self._repeat_at = after(now.instant, REPEAT_INTERVAL)

    def _hold(self, case: _Case, signer: NodeId, held: _Held) -> bool:
        """Hold what this signer says now of a node; whether it is news."""
        heard = self._heard.get(case)
        if heard is None:
            heard = self._heard[case] = _Heard()
            while len(self._heard) > ACCUSED_MAX:
                others = (each for each in self._heard if each != case)
                del self._heard[min(others, key=lambda each: self._node_id in self._heard[each].by_signer)]
        before = heard.by_signer.get(signer)
        if before is not None and before.accusation.issued >= held.accusation.issued:
            return before.data == held.data  # said again: it may not have been looked into
        heard.by_signer.pop(signer, None)
        heard.by_signer[signer] = held
        while len(heard.by_signer) > SIGNERS_MAX:
            surplus = (each for each in heard.by_signer if not self._is_heard(each))
            gone = next(surplus, next(iter(heard.by_signer)))
            del heard.by_signer[gone]
        self._count(case)
        return True

    def _count(self, case: _Case) -> None:
        """Whether enough electors say the same of a node by now: told once for each thing they agree on."""
        heard = self._heard[case]
        said = [
            heard.by_signer[each].accusation for each in sorted(heard.by_signer) if each in self._electors
        ]
        words: tuple[AuditVerdict, ...] = ("quarantined", "unfit")
        for word in words:
            agreeing = [each for each in said if word in (each.word, "unfit")]
            if len(agreeing) < self.n_needed:
                continue
            agreed = Agreed(*case, word, agreeing[0].reason, len(agreeing))
            if agreed != heard.agreed:
                heard.agreed = agreed
                self._effects.append(agreed)
            return

    def _repeat(self, now: Now) -> None:
        """Say our accusations again that are not over, and forget whatever is."""
        self._repeat_at = None
        for case in list(self._heard):
            heard = self._heard[case]
            for signer in [
                each
                for each, held in heard.by_signer.items()
                if has_expired(held.accusation.expires, now.wall)
            ]:
                del heard.by_signer[signer]
            if not heard.by_signer:
                del self._heard[case]
        for data in self._own(now):
            self._effects.append(Publish("records", data))
            self._repeat_at = after(now.instant, REPEAT_INTERVAL)

    def _own(self, now: Now) -> Iterator[bytes]:
        for case, heard in self._heard.items():
            held = heard.by_signer.get(self._node_id)
            if held is not None and self._claim_of(case.node_id) in (None, case.claim_digest):
                yield held.data
