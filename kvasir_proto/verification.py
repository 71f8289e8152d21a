"""One node's part in verifying others: who counts as an auditor, whom it challenges, what it makes of it.

In a swarm whose manifest takes members at their word nothing here happens. Otherwise electors, and holders of
keys that the manifest names, challenge each node that holds experts until enough of them have verified its
certificate, and before their verdicts expire. A founder, and an auditor that the manifest names, may be
backbone by its own word: somebody has to begin. Apart from `node_core`, which knows who is there. How rows
are sent and compared is the driver's and the engine's affair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.admission import may_audit, open_credential
from kvasir_proto.capability import CapabilityRecord, Verdict
from kvasir_proto.challenges import Challenges
from kvasir_proto.effects import Notice, Now, Publish, Send
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, WallTime, after, between, seconds, sooner
from kvasir_proto.limits import Rank, as_sentence
from kvasir_proto.messages.certification import VerdictNotice
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.tolerance_certificate import (
    VERDICT_LIFETIME,
    AuditorVerdict,
    VerdictWord,
    sign_verdict,
)
from kvasir_proto.verdict_book import Auditors, VerdictBook, auditors_needed

if TYPE_CHECKING:
    from random import Random

VERDICT_RENEWED_AFTER: Final[Duration] = Duration(VERDICT_LIFETIME * 3 // 4)
EXPIRY_INTERVAL: Final[Duration] = seconds(60)
"""How often it is looked for verdicts that have expired, or are to be renewed."""
REMINDED_MAX: Final = 4096
"""Nodes of which it is remembered what they had said when they were reminded."""
_REASON_LENGTH_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class ChallengeDue:
    """Challenge this node now, and tell with `ChallengeDone` or `ChallengeFailed` what came of it."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class ChallengeDone:
    """A node was challenged. `certificate` is the digest of the one that it showed, `ranks` those that speak
    of it, `evidence` the digest of the rows.
    """

    node_id: NodeId
    certificate: bytes
    ranks: tuple[Rank, ...]
    word: VerdictWord
    reason: str
    n_rows: int
    evidence: bytes


@dataclass(frozen=True, slots=True)
class ChallengeFailed:
    """A node could not be challenged, or nothing can be said of its answers: no verdict, and tried again."""

    node_id: NodeId
    reason: str


ChallengeResult: TypeAlias = ChallengeDone | ChallengeFailed


@dataclass(frozen=True, slots=True)
class VerdictChanged:
    """Something is known of this node's fitness that was not before, or not any more."""

    node_id: NodeId


VerificationOutput: TypeAlias = Send | Publish | Notice | ChallengeDue | VerdictChanged


class Verification:
    """See the module."""

    def __init__(
        self, private_key: Ed25519PrivateKey, swarm: FoundedSwarm, entropy: Random, now: Now
    ) -> None:
        manifest = swarm.manifest
        self._private_key = private_key
        self._node_id = node_id_of(private_key.public_key().public_bytes_raw())
        self._swarm = swarm
        self.is_needed = manifest.certificates == "verified"
        """Whether a node's own word is not enough in this swarm."""
        self._named = frozenset(node_id_of(each) for each in manifest.auditor_public_keys)
        self._beginners = self._named | {node_id_of(manifest.founder_public_key)}
        self._book = VerdictBook(self._node_id, swarm.digest)
        self._challenges = Challenges(entropy)
        self._expire_at = after(now.instant, EXPIRY_INTERVAL)
        self._reminded: dict[NodeId, int] = {}
        self._effects: list[VerificationOutput] = []

    # --- what is known --------------------------------------------------------------------------------------

    @property
    def auditors(self) -> frozenset[NodeId]:
        """Whose verdicts count; nobody's where members are taken at their word."""
        return self._book.auditors.node_ids

    @property
    def is_auditor(self) -> bool:
        """Whether this node's verdicts count."""
        return self._node_id in self._book.auditors.node_ids

    def verdict_of(self, record: CapabilityRecord, rank: Rank) -> Verdict:
        """What is known of a node's fitness for a rank; where nothing is verified, its own word."""
        return self._book.verdict_of(record, rank) if self.is_needed else record.verdict_of(rank)

    def may_begin(self, record: CapabilityRecord) -> bool:
        """Whether this node may be backbone by its own word, until auditors say that it is unfit."""
        return record.node_id in self._beginners and self.verdict_of(record, "backbone") != "unfit"

    def borne_out(self, record: CapabilityRecord) -> CapabilityRecord:
        """Our own record, with what auditors say of us."""
        if not self.is_needed or not record.verdicts:
            return record
        shown = self._book.for_record(self._node_id, record.verdicts[0].certificate)
        known = {rank: self.verdict_of(record, rank) for rank in record.ranks}
        verdicts = tuple(
            replace(each, verdict=word) if (word := known.get(each.rank, "none")) != "none" else each
            for each in record.verdicts
        )
        return replace(record, verdicts=verdicts, auditor_verdicts=shown)

    # --- what is told ---------------------------------------------------------------------------------------

    def know_electors(self, electors: frozenset[NodeId]) -> None:
        """These vote, and are auditors."""
        if not self.is_needed:
            return
        may_lie = self._swarm.manifest.electorate == "open"
        needed = auditors_needed(len(electors), may_lie=may_lie)
        if self._book.know_auditors(Auditors(electors | self._named, needed)):
            self._effects.append(VerdictChanged(self._node_id))

    def take_record(self, record: CapabilityRecord, now: Now) -> None:
        """Hold what a record shows of auditors' verdicts; what is not good counts for nothing."""
        if self.is_needed:
            for data in record.auditor_verdicts:
                self.take(data, now)

    def take(self, data: bytes, now: Now) -> bool:
        """Hold a signed verdict, whoever brought it; whether it is good and news."""
        if not self.is_needed:
            return False
        try:
            node_id = self._book.take(data, now.wall)
        except RemoteProtocolError:
            return False
        if node_id is not None:
            self._effects.append(VerdictChanged(node_id))
        return node_id is not None

    def forget(self, node_id: NodeId) -> None:
        """This node is gone."""
        self._book.forget(node_id)

    def review(self, holders: Iterable[CapabilityRecord], own: CapabilityRecord | None, now: Now) -> None:
        """These living nodes hold experts: whom of them this node is to challenge."""
        if not self.is_needed or not self.is_auditor:
            return
        wanted = []
        for each in holders:
            if self._needs_challenge(each, own, now.wall):
                wanted.append(each.node_id)
            else:
                self._remind(each)
        self._challenges.need(wanted, now.instant)

    def finish(self, result: ChallengeResult, now: Now) -> None:
        """Say what came of a challenge."""
        if result.node_id != self._challenges.current:
            return  # given up long ago
        if isinstance(result, ChallengeFailed):
            self._challenges.note_failed(result.node_id, now.instant)
            said: tuple[tuple[str, str], ...] = (("node", result.node_id), ("reason", result.reason))
            self._effects.append(Notice("challenge_failed", said))
            return
        self._challenges.note_done(result.node_id, now.instant)
        reason = as_sentence(result.reason)[:_REASON_LENGTH_MAX]
        verdict = AuditorVerdict(
            node_id=result.node_id,
            certificate=result.certificate,
            verdict=result.word,
            ranks=result.ranks,
            reason=reason,
            n_rows=result.n_rows,
            evidence=result.evidence,
            issued=now.wall,
            expires=after(now.wall, VERDICT_LIFETIME),
        )
        data = sign_verdict(verdict, self._private_key, self._swarm.digest)
        self.take(data, now)
        self._effects.append(Send(result.node_id, VerdictNotice(data)))
        if result.word != "verified":
            self._effects.append(Publish("records", data))
        said = (("node", result.node_id), ("verdict", result.word), ("reason", reason))
        self._effects.append(Notice("node_judged", said))

    def tick(self, now: Now) -> None:
        """Challenge whom it is time to, and forget what has expired."""
        if not self.is_needed:
            return
        if self._expire_at <= now.instant:
            self._expire_at = after(now.instant, EXPIRY_INTERVAL)
            self._effects += [VerdictChanged(each) for each in self._book.expire(now.wall)]
            if self.is_auditor:
                self._effects.append(VerdictChanged(self._node_id))  # some verdicts may be due again
        node_id = self._challenges.next_due(now.instant) if self.is_auditor else None
        if node_id is not None:
            self._effects.append(ChallengeDue(node_id))

    def next_deadline(self) -> Instant | None:
        """When to call `tick` next."""
        if not self.is_needed:
            return None
        return sooner(self._expire_at, self._challenges.next_deadline() if self.is_auditor else None)

    def drain(self) -> list[VerificationOutput]:
        """What is to be done and told, in order, each once."""
        effects, self._effects = self._effects, []
        return effects

    def _remind(self, subject: CapabilityRecord) -> None:
        """A node that started again shows our verdict no more: tell it once for each thing it says."""
        said = self._book.held(subject.node_id, self._node_id)
        if said is None or said.verdict.verdict != "verified" or said.data in subject.auditor_verdicts:
            return
        if len(subject.auditor_verdicts) > self._book.auditors.n_needed:
            return
        if self._reminded.get(subject.node_id) != subject.sequence:
            self._reminded.pop(subject.node_id, None)
            while len(self._reminded) >= REMINDED_MAX:
                del self._reminded[next(iter(self._reminded))]
            self._reminded[subject.node_id] = subject.sequence
            self._effects.append(Send(subject.node_id, VerdictNotice(said.data)))

    # --- whom to challenge ----------------------------------------------------------------------------------

    def _needs_challenge(
        self, subject: CapabilityRecord, own: CapabilityRecord | None, now: WallTime
    ) -> bool:
        """Whether too few have verified what this node says of itself, or our own word on it gets old."""
        if subject.node_id == self._node_id or not subject.verdicts or subject.accumulation != "F32":
            return False
        if not self._is_independent(own, subject):
            return False
        certificate = subject.verdicts[0].certificate
        held = self._book.held(subject.node_id, self._node_id)
        if held is not None and held.verdict.certificate == certificate:
            age = between(WallTime(held.verdict.issued), now)
            return held.verdict.verdict == "verified" and age >= VERDICT_RENEWED_AFTER
        wanted = min(self._book.auditors.n_needed + 1, len(self._book.auditors.node_ids))
        return self._book.count_of(subject.node_id, certificate, now) < wanted

    def _is_independent(self, auditor: CapabilityRecord | None, subject: CapabilityRecord) -> bool:
        """Whether the one was admitted by another invite than the other; without invites everybody is."""
        if auditor is None or auditor.credential is None or subject.credential is None:
            return True
        ours, theirs = (
            open_credential(each, self._swarm.digest).credential
            for each in (auditor.credential, subject.credential)
        )
        return may_audit(ours, theirs)
