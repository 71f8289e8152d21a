"""What is proven to this node: electorates, fence, the highest term a quorum was ready for, liars.

Everything here is learned from others and checked by signature, the same way on every node, elector or not.
It only grows: the newest electorate and the fence never go back. Nothing here decides or promises anything.
Whoever holds it looks at `changed` to know what to write to disk and whom to tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import SlotDamaged
from kvasir_proto.election.configuration import LINK, STORED_LINKS_MAX, Link, anchored_link, open_link
from kvasir_proto.election.evidence import Conviction, SeenBallots, verify_evidence
from kvasir_proto.election.readiness import verify_readiness
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import SwarmDigest
from kvasir_proto.limits import Length
from kvasir_proto.messages import Family
from kvasir_proto.messages.election import (
    EVIDENCE_COUNT_MAX,
    LINKS_MAX,
    Evidence,
    Knowledge,
    KnowledgeRequest,
    LinkBytes,
    OptionalProof,
)
from kvasir_proto.signing import SIGNED, Signed
from kvasir_proto.term_proof import (
    NO_PREDECESSOR,
    Electorate,
    ProvenTerm,
    TermProof,
    decode_term_proof,
    verify_term_proof,
)

Change: TypeAlias = Literal["electorate", "fence", "liars"]
ProofOutcome: TypeAlias = Literal["moved", "known", "stale", "unknown_electorate"]
"""What a proof did: the fence moved; it says what we know; it is behind the fence; its electorate is later
than ours, so that it cannot be judged yet."""


@dataclass(frozen=True, slots=True)
class StoredElectorates:
    """The slot `electorate`. `is_anchored`: the electorate that an invite named has been reached."""

    kind: ClassVar[str] = "stored_electorates"
    is_anchored: bool
    links: Annotated[tuple[LinkBytes, ...], Length(0, STORED_LINKS_MAX)]
    evidence: Annotated[tuple[Evidence, ...], Length(0, EVIDENCE_COUNT_MAX)]


@dataclass(frozen=True, slots=True)
class StoredFence:
    """The slot `fence`."""

    kind: ClassVar[str] = "stored_fence"
    proof: OptionalProof


EARLIER_LINKS_MAX: Final = LINKS_MAX // 2
"""Electorates before a named one that an answer begins with."""
STORED_ELECTORATES: Final = Family("stored electorates", (StoredElectorates,), 1 << 20)
STORED_FENCE: Final = Family("stored fence", (StoredFence,), 32 << 10)


class ProvenKnowledge:
    """See the module. `root` is the founder alone; `anchor` the digest of the electorate an invite named.

    Until an electorate with that digest is reached nothing is proven: the founder's key alone could prove any
    term to somebody who knows only the root. A node whose stored electorates end before its stored fence has
    that fence's electorate as its anchor.
    """

    def __init__(
        self,
        swarm_digest: SwarmDigest,
        root: Electorate,
        recovery_public_key: bytes,
        *,
        anchor: bytes | None,
        stored_electorates: bytes | None,
        stored_fence: bytes | None,
    ) -> None:
        self._swarm_digest = swarm_digest
        self._root = root
        self._recovery_public_key = recovery_public_key
        self._anchor = anchor
        self._links: list[Link] = []
        self._earlier: list[Electorate] = []
        """Electorates before the first link, newest first, known by nothing but what followed them."""
        self._ballots = SeenBallots()
        self._convictions: dict[bytes, tuple[Conviction, Evidence]] = {}
        self.is_anchored = anchor is None or anchor == root.digest()
        self.fence: ProvenTerm | None = None
        self.proof = b""
        self.readiness: tuple[bytes, ...] = ()
        self._ready = (0, 0)
        self.changed: set[Change] = set()
        # Our own files: their content was checked when it was learned, and is not checked again.
        try:
            if stored_electorates is not None:
                self._restore_electorates(stored_electorates)
        except RemoteProtocolError as error:
            raise SlotDamaged("electorate", str(error)) from error
        try:
            if stored_fence is not None:
                self._restore_fence(stored_fence)
        except RemoteProtocolError as error:
            raise SlotDamaged("fence", str(error)) from error

    def _restore_electorates(self, data: bytes) -> None:
        stored, self._links = read_electorates(data)
        self.is_anchored = self.is_anchored or stored.is_anchored
        for evidence in stored.evidence:
            conviction = verify_evidence(evidence, self._swarm_digest)
            self._convictions[conviction.liar] = (conviction, evidence)

    def _restore_fence(self, data: bytes) -> None:
        self.proof, proof = read_fence(data)
        self.fence = ProvenTerm(proof.epoch, proof.term, proof.backbone)
        self._ballots.see(proof.votes)
        if proof.electorate.order > self.newest.order:
            # The slot `electorate` was deleted, is an older copy or could not be written. Who went on from
            # the root, the founder above all, would elect itself beside the swarm.
            self._anchor, self.is_anchored = proof.electorate.digest(), False

    # --- what is known --------------------------------------------------------------------------------------

    @property
    def newest(self) -> Electorate:
        """The newest electorate that is committed for all this node knows."""
        return self._links[-1].electorate if self._links else self._root

    @property
    def former_electors(self) -> tuple[bytes, ...]:
        """Who was an elector for all that is proved here and is none any more: public keys, sorted."""
        if not self.is_anchored:
            return ()
        known = [*self._earlier, *(each.electorate for each in self._links)]
        return tuple(sorted({key for each in known for key in each.members} - set(self.newest.members)))

    @property
    def liars(self) -> frozenset[bytes]:
        """Public keys with evidence against them."""
        return frozenset(self._convictions)

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """What proves that they lied."""
        return tuple(evidence for _, evidence in self._convictions.values())

    @property
    def fence_order(self) -> tuple[int, int]:
        """The (epoch, term) of the fence, (0, 0) where there is none."""
        return (0, 0) if self.fence is None else (self.fence.epoch, self.fence.term)

    @property
    def highest_term(self) -> int:
        """The highest term of the newest electorate's epoch that a quorum is known to have been ready for."""
        epoch = self.newest.epoch
        terms = [term for of_epoch, term in (self.fence_order, self._ready) if of_epoch == epoch]
        return max([self.newest.term, *terms])

    def is_void(self, epoch: int, term: int) -> bool:
        """Whether there is evidence of a lie in that term."""
        return any((each.epoch, each.term) == (epoch, term) for each, _ in self._convictions.values())

    def request(self) -> KnowledgeRequest:
        """The question for whatever is not known here yet."""
        newest = self.newest
        anchor = NO_PREDECESSOR if self.is_anchored or self._anchor is None else self._anchor
        return KnowledgeRequest(newest.epoch, newest.version, *self.fence_order, anchor)

    def answer(self, request: KnowledgeRequest) -> Knowledge:
        """What is known here beyond the request, as much as one message carries.

        To who names an electorate also those before it, so that it knows whose signatures counted once.
        """
        links = self._links
        start = len(links)
        if request.anchor != NO_PREDECESSOR:
            named = [i for i, link in enumerate(links) if link.electorate.digest() == request.anchor]
            start = max(0, named[0] - EARLIER_LINKS_MAX) if named else start
        else:
            later = (
                i
                for i, link in enumerate(links)
                if (link.electorate.epoch, link.electorate.version) > (request.epoch, request.version)
            )
            start = next(later, start)
            # An earlier epoch's links are of no use: a recovery follows anything.
            recovered = [i for i, link in enumerate(links) if link.electorate.version == 0]
            if recovered and request.epoch < self.newest.epoch:
                start = max(start, recovered[-1])
        told = tuple(each.data for each in links[start : start + LINKS_MAX])
        is_newer = self.fence_order >= (request.fence_epoch, request.fence_term)
        return Knowledge(told, self.proof if is_newer else b"", self.readiness, self.evidence)

    def request_earlier(self) -> KnowledgeRequest | None:
        """The question for the electorates before the first one known here; None where that is the first.

        Only a node that was invited asks it: it began in the middle of the chain.
        """
        if self._anchor is None or not self.is_anchored or not self._links:
            return None
        first = self._earlier[-1] if self._earlier else self._links[0].electorate
        if first.predecessor in (NO_PREDECESSOR, self._root.digest()):
            return None
        known = len(self._links) + len(self._earlier)
        if known >= STORED_LINKS_MAX:
            return None
        newest = self.newest
        return KnowledgeRequest(newest.epoch, newest.version, *self.fence_order, first.digest())

    def announcement(self, number: int = 0) -> Knowledge:
        """What everybody should hear when it changed: the newest electorate and the fence's proof.

        `number` tells it from the one before, where it goes by gossip.
        """
        return Knowledge(tuple(each.data for each in self._links[-1:]), self.proof, (), (), number)

    def stored_electorates(self) -> bytes:
        """The content of the slot `electorate`."""
        links = tuple(each.data for each in self._links)
        return encode(StoredElectorates(self.is_anchored, links, self.evidence))

    def stored_fence(self) -> bytes:
        """The content of the slot `fence`."""
        return encode(StoredFence(self.proof))

    # --- learning -------------------------------------------------------------------------------------------

    def learn_links(self, links: Sequence[bytes]) -> int:
        """Adopt what follows the newest electorate, and say how many did. Old links are passed over.

        Raises `RemoteProtocolError` as `open_link` does for the first that is later than what is known and
        does not follow it.
        """
        learned = 0
        if not self.is_anchored:
            # What came before the electorate that the invite named is for `learn_earlier`.
            named = [i for i, data in enumerate(links) if self._is_anchor(data)]
            links = links[named[0] :] if named else links
        for data in links:
            link = self._open(data)
            if link is None:
                continue
            if not self.is_anchored and link.electorate.digest() == self._anchor:
                self._links.clear()
            self._links.append(link)
            del self._links[:-STORED_LINKS_MAX]
            self.is_anchored = self.is_anchored or link.electorate.digest() == self._anchor
            self.readiness = ()
            self.changed.add("electorate")
            learned += 1
            if link.proof and self.is_anchored:
                self._follow_link(link.proof)
        return learned

    def _is_anchor(self, data: bytes) -> bool:
        return _trusted_link(data).electorate.digest() == self._anchor

    def learn_earlier(self, links: Sequence[bytes]) -> int:
        """Take in electorates before the first one known here, and say how many there were.

        Each is named by the digest of the one that followed it: no signature is needed, and nothing but who
        was an elector follows from it.
        """
        if not self.is_anchored or not self._links:
            return 0
        by_digest = {each.digest(): each for each in (_trusted_link(data).electorate for data in links)}
        learned = 0
        while len(self._links) + len(self._earlier) < STORED_LINKS_MAX:
            first = self._earlier[-1] if self._earlier else self._links[0].electorate
            before = by_digest.get(first.predecessor)
            if before is None:
                break
            self._earlier.append(before)
            self.changed.add("electorate")
            learned += 1
        return learned

    def _follow_link(self, data: bytes) -> None:
        """The endorsements that committed an electorate prove who was the backbone then."""
        proof = decode_term_proof(data)
        term = ProvenTerm(proof.epoch, proof.term, proof.backbone)
        order = (proof.epoch, proof.term)
        is_same = self.fence is not None and term == self.fence
        if (order > self.fence_order or is_same) and not self.is_void(*order):
            self._move_fence(term, data, proof.votes)
        else:
            self.see_ballots(proof.votes)

    def _open(self, data: bytes) -> Link | None:
        """The link, if it is later than the newest electorate and follows it; None if it is not later."""
        candidate = _trusted_link(data).electorate
        if not self.is_anchored and self._anchor is not None and candidate.digest() == self._anchor:
            return anchored_link(data, self._anchor)
        if candidate.order <= self.newest.order:
            return None
        return open_link(data, self.newest, self._swarm_digest, self._recovery_public_key)

    def learn_proof(self, data: bytes) -> ProofOutcome:
        """Move the fence if this proves a later term, or a term's later electorate.

        Raises `RemoteProtocolError` as `verify_term_proof` does, `old_electorate`, or `void` for a term that
        a liar spoilt.
        """
        if data == self.proof:
            return "known"
        proof = decode_term_proof(data)
        if not self.is_anchored or proof.electorate.order > self.newest.order:
            return "unknown_electorate"
        order = (proof.epoch, proof.term)
        if order < self.fence_order:
            return "stale"
        if proof.electorate != self.newest:
            raise RemoteProtocolError("the term proof is under an electorate of the past", "old_electorate")
        if self.is_void(*order):
            raise RemoteProtocolError("an elector lied in this term: it is void", "void")
        if self.fence is not None and (*order, proof.backbone) == self.fence:
            known = decode_term_proof(self.proof)
            if known.electorate == proof.electorate:
                return "known"
        term = verify_term_proof(data, self._swarm_digest, self.newest, self.liars)
        if order == self.fence_order and self.fence is not None and term.backbone != self.fence.backbone:
            self.see_ballots(proof.votes)  # two proofs of one term: their quorums share a liar
            return "known"
        self._move_fence(term, data, proof.votes)
        return "moved"

    def _move_fence(self, term: ProvenTerm, proof: bytes, votes: Sequence[Signed]) -> None:
        self.fence, self.proof = term, proof
        self.changed.add("fence")
        self.see_ballots(votes)

    def see_ballots(self, ballots: Sequence[Signed]) -> None:
        """Look for lies in votes and endorsements whose signatures are good."""
        for evidence in self._ballots.see(ballots):
            self.learn_evidence(evidence)

    def learn_readiness(self, pre_votes: Sequence[bytes]) -> ProvenTerm:
        """Note the term a quorum was ready for. Raises `RemoteProtocolError` as `verify_readiness` does."""
        ready = verify_readiness(pre_votes, self._swarm_digest, self.newest, self.liars)
        if (ready.epoch, ready.term) > max(self._ready, self.fence_order):
            self._ready, self.readiness = (ready.epoch, ready.term), tuple(pre_votes)
        return ready

    def learn_evidence(self, evidence: Evidence) -> None:
        """Believe that somebody lied, once. Raises `RemoteProtocolError` as `verify_evidence` does.

        Only about somebody who is or was an elector, and only the first time: a known liar's votes count for
        nothing, so that it cannot void one term after another.
        """
        if decode(evidence.first, SIGNED).signer in self._convictions:
            return
        conviction = verify_evidence(evidence, self._swarm_digest)
        known = [self._root, *(each.electorate for each in self._links)]
        if all(conviction.liar not in each.members for each in known):
            return
        if len(self._convictions) >= EVIDENCE_COUNT_MAX:
            harmless = [each for each in self._convictions if each not in self.newest.members]
            del self._convictions[harmless[0]]  # an electorate is smaller than the table
        self._convictions[conviction.liar] = (conviction, evidence)
        self.changed.add("liars")


def _trusted_link(data: bytes) -> Link:
    return Link(decode(data, LINK).electorate, data, b"")


def read_electorates(data: bytes) -> tuple[StoredElectorates, list[Link]]:
    """What the slot `electorate` holds. Raises `RemoteProtocolError` for what cannot be read."""
    stored = decode(data, STORED_ELECTORATES)
    return stored, [_trusted_link(each) for each in stored.links]


def read_fence(data: bytes) -> tuple[bytes, TermProof]:
    """The proof in the slot `fence`, as it is and what it says. Raises `RemoteProtocolError`."""
    proof = decode(data, STORED_FENCE).proof
    return proof, decode_term_proof(proof)
