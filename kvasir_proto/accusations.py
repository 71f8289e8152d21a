"""One node's part in judging others by evidence: what it was told, what it recomputes, when a swarm agrees.

An accusation binds nobody but its signer. Each elector that hears one of another elector, or of the backbone,
asks for the evidence, checks that the accused really gave those rows as it is certified now, has them
recomputed, and accuses it too if they are wrong. Once as many electors have recomputed it as could not all be
lying, two at least, it is the swarm's verdict. Signers have their turns, and each its own places and its own
time of others' engines: who says much takes them from itself. Whose accusation is not borne out is not
listened to for a while, then for longer; that changes nothing for the accused. Apart from `node_core`, which
knows who is there and what they claim, and from verdicts that hold (`verdicts_in_force`). It reads no clock
and no weights.
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
from kvasir_proto.audit.evidence import EVIDENCE_SIZE_MAX, ROWS_NEEDED, open_evidence
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
ACCUSED_OF_SIGNER_MAX: Final = 64
"""Nodes, each as certified then, of which one signer's accusations are held and wait; its oldest go first."""
SIGNERS_MAX: Final = 16
"""Whose accusations are held: all electors, the backbone, this node, and some that were electors."""
EVIDENCE_KEPT_MAX: Final = ACCUSED_OF_SIGNER_MAX
EVIDENCE_KEPT_BYTES_MAX: Final = 12 * EVIDENCE_SIZE_MAX
"""Evidence that others can ask for: 15 MiB, twelve pieces at least. Of more that goes first which nobody
needs any more, since its swarm has agreed or this node says it no more, and then what is oldest."""
ANSWER_TIMEOUT: Final[Duration] = seconds(30)
"""How long an elector waits for evidence, and so how often the same piece goes to the same one."""
RECOMPUTE_TIMEOUT: Final[Duration] = seconds(120)
SPACING: Final[Duration] = seconds(1)
"""Between two that are looked into."""
REPEAT_INTERVAL: Final[Duration] = seconds(600)
"""How often this node says its accusations again, for those that were away."""
DISTRUST_FIRST: Final[Duration] = seconds(600)
DISTRUST_MAX: Final[Duration] = seconds(24 * 3600)
"""An accusation that was not borne out: its signer's others wait for 10 minutes, then 20, up to a day."""
UNSHOWN_FIRST: Final[Duration] = seconds(60)
UNSHOWN_MAX: Final[Duration] = seconds(960)
"""One of which nothing came, no answer or nothing that can be judged: a minute, then two, up to sixteen,
until one is borne out. An honest signer may be away, or have let that evidence go."""
RECOMPUTE_TIME_HOURLY: Final[Duration] = seconds(300)
"""Time of this node's engine that one signer's accusations may take in an hour, and what it begins with: so
twice that in any one hour. One that may take longer than what is left waits."""
SIGNERS_REMEMBERED: Final = 256
_HOUR: Final[Duration] = seconds(3600)
_LONG_AGO: Final = Instant(0)


@dataclass(frozen=True, slots=True)
class RecomputationDue:
    """Recompute the rows of this evidence, which the node gave as one with that claim, and tell with
    `Recomputed` what came of it.
    """

    node_id: NodeId
    claim_digest: bytes
    evidence: bytes
    digest: bytes
    """Of the evidence; `Recomputed` names it."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Rows were recomputed: `word` is what follows from them for the node, None where nothing does.

    `is_conclusive` is false where they could not be recomputed, which speaks against nobody.
    """

    node_id: NodeId
    digest: bytes
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


class _Kept(NamedTuple):
    case: _Case
    evidence: bytes


_CasesBySigner: TypeAlias = OrderedDict[NodeId, OrderedDict[_Case, None]]
"""Of each signer the oldest first."""


@dataclass(slots=True)
class _Inquiry:
    """What is being looked into: whose word it is, and what of it there is by now."""

    case: _Case
    signer: NodeId
    digest: bytes
    until: Instant
    evidence: bytes = b""
    shown_at: Instant = _LONG_AGO
    """When its evidence went to be recomputed."""


@dataclass(slots=True)
class _Signer:
    """What came of a signer's accusations here, and how much of the engine's time it has left."""

    refuted: int = 0
    unshown: int = 0
    asked_at: Instant = _LONG_AGO
    distrusted_until: Instant = _LONG_AGO
    time_left: Duration = RECOMPUTE_TIME_HOURLY
    counted_at: Instant = _LONG_AGO

    def note_time(self, now: Instant, spent: Duration) -> None:
        """So much of it was used, and some has come back since it was counted last."""
        gained = max(0, now - self.counted_at) * RECOMPUTE_TIME_HOURLY // _HOUR
        left = min(RECOMPUTE_TIME_HOURLY, self.time_left + gained)
        self.time_left, self.counted_at = Duration(left - spent), now

    def heard_at(self) -> Instant:
        """When one more of its accusations can be looked into."""
        missing = max(0, RECOMPUTE_TIMEOUT - self.time_left)
        back = -(-missing * _HOUR // RECOMPUTE_TIME_HOURLY)
        return max(self.distrusted_until, after(self.counted_at, Duration(back)))


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
        self._evidence: OrderedDict[bytes, _Kept] = OrderedDict()
        self._shown: dict[tuple[NodeId, bytes], Instant] = {}
        """Who was shown which evidence when, in the last moments."""
        self._said: _CasesBySigner = OrderedDict()
        self._waiting: _CasesBySigner = OrderedDict()
        self._inquiry: _Inquiry | None = None
        self._free_at = Instant(0)
        self._signers: OrderedDict[NodeId, _Signer] = OrderedDict()
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
        case = _Case(request.node_id, request.claim_digest)
        digest = self._keep(case, request.evidence)
        self._sign(
            case,
            request.word,
            request.reason,
            request.n_rows,
            digest,
            now,
        )

    def own(self) -> tuple[bytes, ...]:
        """What this node has signed and still says, `ACCUSED_OF_SIGNER_MAX` at most; to be kept."""
        said = self._said.get(self._node_id, ())
        return tuple(self._heard[case].by_signer[self._node_id].data for case in said)

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
        if self._claim_of(accusation.node_id) is None:
            return False  # nobody knows that node; it is said again
        case = _Case(accusation.node_id, accusation.claim_digest)
        heard = self._hold(case, signer, _Held(accusation, data))
        if heard and self._is_to_look_into(case, signer):
            self._waiting.setdefault(signer, OrderedDict())[case] = None
            self._look(now)
        return heard

    def receive(self, message: EvidenceRequest | EvidenceReply, sender: NodeId, now: Now) -> None:
        """Raises `RemoteProtocolError` for who may not ask, or not yet, and for evidence that is none."""
        if isinstance(message, EvidenceRequest):
            self._show(message.evidence, sender, now.instant)
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
        if self._claim_of(inquiry.case.node_id) != inquiry.case.claim_digest:
            self._end(now)  # it has other certificates meanwhile
            return
        inquiry.evidence, inquiry.shown_at = message.evidence, now.instant
        inquiry.until = after(now.instant, RECOMPUTE_TIMEOUT)
        self._effects.append(RecomputationDue(*inquiry.case, message.evidence, inquiry.digest))

    def finish(self, result: Recomputed, now: Now) -> None:
        """Say what came of a recomputation."""
        inquiry = self._inquiry
        if inquiry is None or not inquiry.evidence:
            return  # given up long ago
        if (inquiry.case.node_id, inquiry.digest) != (result.node_id, result.digest):
            return  # so was that one
        if self._claim_of(inquiry.case.node_id) != inquiry.case.claim_digest:
            self._end(now)  # it may have been judged by what it claims now
        elif not result.is_conclusive:
            self._doubt(inquiry, result.reason or "its rows cannot be judged", now)
        elif result.word is None or result.n_rows < ROWS_NEEDED:
            self._refute(inquiry, result.reason or "the rows are right", now)
        else:
            digest = self._keep(inquiry.case, inquiry.evidence)
            self._sign(inquiry.case, result.word, result.reason, result.n_rows, digest, now)
            self._signer(inquiry.signer).unshown = 0
            self._end(now)

    def tick(self, now: Now) -> None:
        """Give up what nobody answers, look into the next one, and say again what is still so."""
        inquiry = self._inquiry
        if inquiry is not None and inquiry.until <= now.instant:
            reason = "recomputing its rows takes too long" if inquiry.evidence else "nobody shows its rows"
            self._doubt(inquiry, reason, now)
        if self._repeat_at is not None and self._repeat_at <= now.instant:
            self._repeat(now)
        self._look(now)

    def next_deadline(self) -> Instant | None:
        """When to call `tick` next."""
        if self._inquiry is not None:
            return sooner(self._inquiry.until, self._repeat_at)
        turn = min((self._heard_at(each) for each in self._waiting), default=None)
        return sooner(None if turn is None else max(turn, self._free_at), self._repeat_at)

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
            and self._is_heard(signer)
            and self._claim_of(case.node_id) == case.claim_digest
        )

    def _look(self, now: Now) -> None:
        """Ask for the evidence of the next accusation, if nothing else is being looked into."""
        if self._inquiry is not None or now.instant < self._free_at:
            return
        for signer in sorted(self._waiting, key=self._asked_at):
            if self._heard_at(signer) > now.instant:
                continue
            while signer in self._waiting:
                case = next(reversed(self._waiting[signer]))  # the newest: evidence is kept of few
                self._let_go(self._waiting, case, signer)
                if self._is_to_look_into(case, signer):
                    self._signer(signer).asked_at = now.instant
                    digest = self._heard[case].by_signer[signer].accusation.evidence
                    self._inquiry = _Inquiry(case, signer, digest, after(now.instant, ANSWER_TIMEOUT))
                    self._effects.append(Send(signer, EvidenceRequest(digest)))
                    return

    def _signer(self, node_id: NodeId) -> _Signer:
        """What is remembered of it; of a new one nothing, and of who was not looked into longest no more."""
        signer = self._signers.pop(node_id, None) or _Signer()
        self._signers[node_id] = signer
        while len(self._signers) > SIGNERS_REMEMBERED:
            self._signers.popitem(last=False)
        return signer

    def _heard_at(self, node_id: NodeId) -> Instant:
        signer = self._signers.get(node_id)
        return signer.heard_at() if signer is not None else _LONG_AGO

    def _asked_at(self, node_id: NodeId) -> Instant:
        """When it had its turn last; whoever waits longest has the next one."""
        signer = self._signers.get(node_id)
        return signer.asked_at if signer is not None else _LONG_AGO

    def _doubt(self, inquiry: _Inquiry, reason: str, now: Now) -> None:
        """Nothing came of it: that shows nothing of the accused, and costs its signer some time."""
        signer = self._signer(inquiry.signer)
        signer.unshown += 1
        lasts = min(UNSHOWN_MAX, UNSHOWN_FIRST << min(signer.unshown - 1, 16))
        self._distrust(inquiry, signer, Duration(lasts), "accusation_not_shown", reason, now)

    def _refute(self, inquiry: _Inquiry, reason: str, now: Now) -> None:
        """What this signer says of the accused is not so: it is forgotten, and the signer believed less."""
        self._forget(inquiry.case, inquiry.signer)
        signer = self._signer(inquiry.signer)
        signer.refuted += 1
        lasts = min(DISTRUST_MAX, DISTRUST_FIRST << min(signer.refuted - 1, 16))
        self._distrust(inquiry, signer, Duration(lasts), "accusation_refuted", reason, now)

    def _distrust(
        self, inquiry: _Inquiry, signer: _Signer, lasts: Duration, event: str, reason: str, now: Now
    ) -> None:
        signer.distrusted_until = max(signer.distrusted_until, after(now.instant, lasts))
        fields = (
            ("node", inquiry.case.node_id),
            ("accuser", inquiry.signer),
            ("reason", as_sentence(reason)),
        )
        self._effects.append(Notice(event, fields))
        self._end(now)

    def _end(self, now: Now) -> None:
        inquiry, self._inquiry = self._inquiry, None
        if inquiry is not None and inquiry.evidence:
            spent = Duration(now.instant - inquiry.shown_at)
            self._signer(inquiry.signer).note_time(now.instant, spent)
        self._free_at = after(now.instant, SPACING)
        self._look(now)

    def _keep(self, case: _Case, evidence: bytes) -> bytes:
        digest = hashlib.sha256(evidence).digest()
        self._evidence.pop(digest, None)
        self._evidence[digest] = _Kept(case, evidence)
        size_bytes = sum(len(each.evidence) for each in self._evidence.values())
        while len(self._evidence) > EVIDENCE_KEPT_MAX or size_bytes > EVIDENCE_KEPT_BYTES_MAX:
            others = (each for each in self._evidence if each != digest)
            gone = self._evidence.pop(min(others, key=self._is_needed))
            size_bytes -= len(gone.evidence)
        return digest

    def _is_needed(self, digest: bytes) -> bool:
        """Whether others may yet ask for this evidence to some end."""
        case = self._evidence[digest].case
        is_said = case in self._said.get(self._node_id, ())
        return is_said and self._heard[case].agreed is None

    def _show(self, digest: bytes, elector: NodeId, now: Instant) -> None:
        """Raises `RemoteProtocolError` for who does not vote, and who has just been shown it."""
        if elector not in self._electors:
            raise RemoteProtocolError("only electors ask for evidence", "not_an_elector")
        kept = self._evidence.get(digest)
        if kept is None:
            return
        self._shown = {to: at for to, at in self._shown.items() if after(at, ANSWER_TIMEOUT) > now}
        if (elector, digest) in self._shown:
            raise RemoteProtocolError("it was shown that a moment ago", "too_often")
        self._shown[elector, digest] = now
        self._effects.append(Send(elector, EvidenceReply(kept.evidence)))

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
        heard = self._heard.setdefault(case, _Heard())
        before = heard.by_signer.get(signer)
        if before is not None and before.accusation.issued >= held.accusation.issued:
            return before.data == held.data  # said again: it may not have been looked into
        heard.by_signer[signer] = held
        said = self._said.setdefault(signer, OrderedDict())
        said.pop(case, None)
        said[case] = None
        if len(said) > ACCUSED_OF_SIGNER_MAX:
            self._forget(next(iter(said)), signer)
        if len(self._said) > SIGNERS_MAX:
            others = (each for each in self._said if each not in (signer, self._node_id))
            gone = min(others, key=self._is_heard)
            for each in list(self._said[gone]):
                self._forget(each, gone)
        self._count(case)
        return True

    def _forget(self, case: _Case, signer: NodeId) -> None:
        """What this signer says of a node, wherever it is noted."""
        heard = self._heard.get(case)
        if heard is not None:
            heard.by_signer.pop(signer, None)
            if not heard.by_signer:
                del self._heard[case]
        self._let_go(self._said, case, signer)
        self._let_go(self._waiting, case, signer)

    @staticmethod
    def _let_go(table: _CasesBySigner, case: _Case, signer: NodeId) -> None:
        cases = table.get(signer)
        if cases is not None:
            cases.pop(case, None)
            if not cases:
                del table[signer]

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
        for case, heard in list(self._heard.items()):
            for signer, held in list(heard.by_signer.items()):
                if has_expired(held.accusation.expires, now.wall):
                    self._forget(case, signer)
        for data in self._own(now):
            self._effects.append(Publish("records", data))
            self._repeat_at = after(now.instant, REPEAT_INTERVAL)

    def _own(self, now: Now) -> Iterator[bytes]:
        for case, heard in self._heard.items():
            held = heard.by_signer.get(self._node_id)
            if held is not None and self._claim_of(case.node_id) in (None, case.claim_digest):
                yield held.data
