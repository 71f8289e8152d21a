"""What an elector has promised, and so what it may still sign: the rules against a second backbone.

One vote in a term; none while a promise to somebody else runs, none for a while after a start; one assent to
an electorate a ballot, and none against one that it endorsed and that may be committed. What is signed is on
disk before it is sent: the owner writes `stored()` out whenever `is_changed`. Knows nothing of roles and
timers; whoever is proven to be what is `ProvenKnowledge`'s part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import SlotDamaged
from kvasir_proto.election.configuration import PROPOSAL, Proposal, is_nominated, require_successor
from kvasir_proto.election.knowledge import ProvenKnowledge
from kvasir_proto.election.lease import Promise, promised_until
from kvasir_proto.election.options import ElectionOptions
from kvasir_proto.election.prepared import Prepared, open_prepared, peek_prepared, sign_assent
from kvasir_proto.election.readiness import sign_pre_vote
from kvasir_proto.election.succession import OPEN_MIN
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import Epoch, NodeId, SwarmDigest, Term, node_id_of, public_key_of
from kvasir_proto.instants import Duration, Instant, after, between
from kvasir_proto.limits import ELECTORS_MAX, UINT32_MAX, Length
from kvasir_proto.messages import Family
from kvasir_proto.messages.election import (
    BALLOT_SIZE_MAX,
    PROPOSAL_SIZE_MAX,
    AssentGrant,
    AssentRefusal,
    AssentRequest,
    ElectorateProposal,
    OptionalPrepared,
    Readiness,
    RefusalReason,
)
from kvasir_proto.signing import SIGNED
from kvasir_proto.term_proof import VOTE, Electorate, ProvenTerm, Vote, cast_vote, endorse

TERM_STEP_MAX: Final = 8
"""How far above the highest term it knows an elector gives a pre-vote. Enough for terms that failed under an
electorate which is already gone; few enough that 2^32 terms last for decades of one attempt a patience."""


@dataclass(frozen=True, slots=True)
class StoredPromises:
    """The slot `election`: the last vote, empty before the first, and the readiness it was asked with; the
    highest term this node won; the last proposal it assented to; the prepared electorate it endorsed last."""

    kind: ClassVar[str] = "stored_promises"
    vote: Annotated[bytes, Length(0, BALLOT_SIZE_MAX)]
    readiness: Readiness
    won_epoch: Epoch
    won_term: Term
    assented: Annotated[bytes, Length(0, PROPOSAL_SIZE_MAX)]
    prepared: OptionalPrepared


STORED_PROMISES: Final = Family("stored promises", (StoredPromises,), 64 << 10)
_UNUSED_COUNT_MAX: Final = 2
"""A candidate whose votes came to nothing waits a patience, doubled at most this often, for the next one."""
_NOTHING: Final = StoredPromises(b"", (), 0, 0, b"", b"")


@dataclass(frozen=True, slots=True)
class MemberView:
    """What this node thinks of others, as its `node_core` says: may be an elector, is dead, must not vote or
    be voted for (revoked, quarantined, unfit)."""

    eligible: frozenset[NodeId] = frozenset()
    dead: frozenset[NodeId] = frozenset()
    barred: frozenset[NodeId] = frozenset()


class Elector:
    """See the module. `now` is when the node started: until a promise's time later it gives no vote."""

    def __init__(
        self,
        private_key: Ed25519PrivateKey,
        swarm_digest: SwarmDigest,
        founder: NodeId,
        knowledge: ProvenKnowledge,
        options: ElectionOptions,
        stored: bytes | None,
        now: Instant,
    ) -> None:
        self._private_key = private_key
        self._public_key = private_key.public_key().public_bytes_raw()
        self._node_id = node_id_of(self._public_key)
        self._swarm_digest = swarm_digest
        self._founder = founder
        self._knowledge = knowledge
        self._options = options
        try:
            kept = (_NOTHING, None, None, None) if stored is None else read_promises(stored)
        except RemoteProtocolError as error:
            raise SlotDamaged("election", str(error)) from error
        self._kept, self._vote, self._assented, self._prepared = kept
        self._bound_until = promised_until(now, options.lease)
        self._unused: dict[NodeId, tuple[int, Instant]] = {}
        self._courtesy: tuple[NodeId, Instant] | None = None
        self.promise: Promise | None = None
        self.view = MemberView()
        self.is_changed = False

    # --- what was promised ----------------------------------------------------------------------------------

    @property
    def voted(self) -> tuple[int, int]:
        """The highest (epoch, term) it voted in, (0, 0) if none."""
        return (0, 0) if self._vote is None else (self._vote.epoch, self._vote.term)

    @property
    def won(self) -> tuple[int, int]:
        """The highest (epoch, term) that this node won itself."""
        return (self._kept.won_epoch, self._kept.won_term)

    @property
    def readiness(self) -> tuple[bytes, ...]:
        """The quorum of pre-votes that its last vote was asked with."""
        return self._kept.readiness

    @property
    def highest_term(self) -> int:
        """The highest term of the present epoch that it knows a quorum was ready for."""
        epoch, term = self.voted
        return max(self._knowledge.highest_term, term if epoch == self._knowledge.newest.epoch else 0)

    def is_elector(self) -> bool:
        """Whether it has a vote in the newest electorate."""
        return self._public_key in self._knowledge.newest.members

    def stored(self) -> bytes:
        """The content of the slot `election`."""
        return encode(self._kept)

    # --- votes ----------------------------------------------------------------------------------------------

    def objection(
        self, candidate: NodeId, epoch: int, term: int, digest: bytes, now: Instant
    ) -> RefusalReason | None:
        """Why it would not vote for this candidate in this term now; None if it would."""
        knowledge = self._knowledge
        newest = knowledge.newest
        if candidate in self.view.barred or public_key_of(candidate) in knowledge.liars:
            return "barred"
        if not knowledge.is_anchored or epoch != newest.epoch or digest != newest.digest():
            return "electorate"
        if not self.is_elector():
            return "no_elector"
        if (epoch, term) <= knowledge.fence_order or term <= newest.term:
            return "behind"
        is_repeated = (
            (epoch, term) == self.voted and self._vote is not None and self._vote.backbone == candidate
        )
        if (epoch, term) <= self.voted and not is_repeated:
            return "behind"
        if term > min(self.highest_term + TERM_STEP_MAX, UINT32_MAX):
            return "ahead"
        if now < self._bound_until:
            return "restarted"
        is_bound = self.promise is not None and self.promise.binds_against(candidate, now)
        if is_bound or (not is_repeated and self.wait(candidate, now) > 0):
            return "promised"
        return None

    def wait(self, candidate: NodeId, now: Instant) -> Duration:
        """For how long its promise, its restart or its last vote still keeps it from voting for this one."""
        ends = [self._bound_until]
        if self.promise is not None and self.promise.binds_against(candidate, now):
            ends.append(self.promise.until)
        if self._courtesy is not None and self._courtesy[0] != candidate:
            ends.append(self._courtesy[1])
        if candidate in self._unused:
            count, voted_at = self._unused[candidate]
            ends.append(after(voted_at, Duration(self._options.patience << count)))
        return max(Duration(0), between(now, max(ends)))

    def pre_vote(self, term: ProvenTerm) -> bytes:
        """A signed pre-vote, to be given only without an `objection`."""
        return sign_pre_vote(self._private_key, self._swarm_digest, self._knowledge.newest, term)

    def vote(self, term: ProvenTerm, readiness: tuple[bytes, ...], now: Instant) -> bytes:
        """The signed vote, to be given only without an `objection` and for a term a quorum was ready for.

        The same candidate that asks again in the same term gets the same bytes.
        """
        newest = self._knowledge.newest
        vote = Vote(*term, newest.digest())
        if vote != self._vote:
            assert (term.epoch, term.term) >= self.voted
            signed = encode(cast_vote(self._private_key, self._swarm_digest, newest, term))
            self._vote = vote
            self._keep(vote=signed, readiness=readiness)
            self._note_unused(term.backbone, now)
        self._courtesy = (term.backbone, after(now, self._options.patience))
        return self._kept.vote

    def _note_unused(self, candidate: NodeId, now: Instant) -> None:
        """It has a vote and no lease yet. Who wins terms without using them must leave room for others."""
        count, _ = self._unused.pop(candidate, (0, now))
        self._unused[candidate] = (min(count + 1, _UNUSED_COUNT_MAX), now)
        if len(self._unused) > ELECTORS_MAX * 2:
            del self._unused[next(iter(self._unused))]

    def prepared_successor(self) -> bytes:
        """The prepared electorate it endorsed for the place after the newest one; empty if none."""
        prepared = self._prepared
        if prepared is None or prepared.electorate.predecessor != self._knowledge.newest.digest():
            return b""
        return self._kept.prepared

    def note_won(self, epoch: int, term: int) -> None:
        """This node won a term."""
        self._keep(won_epoch=epoch, won_term=term)

    # --- leases ---------------------------------------------------------------------------------------------

    def grant(self, backbone: NodeId, epoch: int, term: int, now: Instant) -> RefusalReason | None:
        """Promise a lease to the proven backbone; the reason if not.

        An earlier promise to somebody else does not matter: the proof says that a quorum was free to vote, so
        that a quorum of the other's electors is bound no more.
        """
        knowledge = self._knowledge
        if knowledge.fence is None or (epoch, term, backbone) != knowledge.fence:
            return "behind" if (epoch, term) <= knowledge.fence_order else "ahead"
        if (epoch, term) < self.voted:
            return "behind"
        if knowledge.is_void(epoch, term):
            return "voided"
        if not self.is_elector():
            return "no_elector"
        self._unused.pop(backbone, None)
        self.promise = Promise(epoch, term, backbone, promised_until(now, self._options.lease))
        return None

    def release(self, epoch: int, term: int, backbone: NodeId) -> bool:
        """The backbone gave its lease back: the promise to it ends. Says whether there was one."""
        promise = self.promise
        if promise is None or (promise.epoch, promise.term, promise.backbone) != (epoch, term, backbone):
            return False
        self.promise = self._courtesy = None
        return True

    # --- electorates ----------------------------------------------------------------------------------------

    def assent(self, message: AssentRequest, sender: NodeId) -> AssentGrant | AssentRefusal:
        """Assent to a proposal of the proven backbone, whose proof has been learned before.

        Refuses, saying which, where it endorsed another electorate in this place and is not shown that this
        one was prepared later. Raises `RemoteProtocolError`: as `open_prepared` and `require_successor` do,
        `not_the_backbone`, `no_elector`, `behind`, `assented_another`, `not_nominated`, `not_eligible`,
        `not_dead`.
        """
        proposal = decode(message.proposal, PROPOSAL)
        self._require_proper(proposal, sender)
        assented = self._assented
        if assented is not None and proposal.ballot == assented.ballot and proposal != assented:
            raise RemoteProtocolError("this elector assented to another one there", "assented_another")
        shown = None
        if message.prepared:
            shown = open_prepared(message.prepared, self._knowledge.newest, self._swarm_digest)
            if shown.electorate != proposal.electorate:
                raise RemoteProtocolError("another electorate was prepared", "wrong_electorate")
        if not self._may_change_to(
            proposal.electorate, (0, 0, 0) if shown is None else shown.proposal.ballot
        ):
            return AssentRefusal(self.prepared_successor())
        if shown is None:  # else as many found it fair as may have committed it
            self._require_fair(proposal)
        if proposal != assented:
            self._assented = proposal
            self._keep(assented=message.proposal)
        return AssentGrant(sign_assent(self._private_key, self._swarm_digest, proposal, sender))

    def endorse(self, message: ElectorateProposal, sender: NodeId) -> bytes:
        """Endorse a prepared electorate of the proven backbone, whose proof has been learned before.

        Raises `RemoteProtocolError`: as `open_prepared` does, `not_the_backbone`, `no_elector`, `behind`,
        `endorsed_another`.
        """
        prepared = peek_prepared(message.prepared)
        proposal, electorate = prepared.proposal, prepared.electorate
        self._require_proper(proposal, sender)
        if prepared.backbone != sender:
            raise RemoteProtocolError("prepared for another backbone", "not_the_backbone")
        open_prepared(message.prepared, self._knowledge.newest, self._swarm_digest)
        if not self._may_change_to(electorate, proposal.ballot):
            raise RemoteProtocolError("this elector endorsed another electorate there", "endorsed_another")
        if self._prepared is None or self._prepared.proposal != proposal:
            self._prepared = prepared
            self._keep(prepared=message.prepared)
        term = ProvenTerm(proposal.epoch, proposal.term, sender)
        return encode(endorse(self._private_key, self._swarm_digest, electorate, term, proposal.number))

    def _require_proper(self, proposal: Proposal, sender: NodeId) -> None:
        """What makes it a proposal at all, whatever is seen from here."""
        knowledge, electorate = self._knowledge, proposal.electorate
        if knowledge.fence != (proposal.epoch, proposal.term, sender):
            raise RemoteProtocolError("only the proven backbone proposes electorates", "not_the_backbone")
        if (proposal.epoch, proposal.term) < self.voted or knowledge.is_void(proposal.epoch, proposal.term):
            raise RemoteProtocolError("this elector has voted in a later term", "behind")
        if self._assented is not None and proposal.ballot < self._assented.ballot:
            raise RemoteProtocolError("this elector has assented to a later proposal", "behind")
        if self._prepared is not None and proposal.ballot < self._prepared.proposal.ballot:
            raise RemoteProtocolError("this elector has endorsed a later proposal", "behind")
        require_successor(electorate, knowledge.newest)
        if electorate.term > proposal.term:
            raise RemoteProtocolError("an electorate of a later term", "wrong_electorate")
        if self._public_key not in {*knowledge.newest.members, *electorate.members}:
            raise RemoteProtocolError("no elector of either electorate", "no_elector")

    def _may_change_to(self, electorate: Electorate, ballot: tuple[int, int, int]) -> bool:
        """Whether it may help to make this one, which was prepared in that ballot: the lock of the module
        `prepared`. It binds the electors of the newest electorate, who alone decide what follows it."""
        locked = self._prepared
        return (
            locked is None
            or not self.is_elector()
            or locked.electorate.predecessor != electorate.predecessor
            or locked.electorate == electorate
            or locked.proposal.ballot < ballot
        )

    def _require_fair(self, proposal: Proposal) -> None:
        """What an elector asks of a change, whatever the backbone thinks."""
        newest, electorate = self._knowledge.newest, proposal.electorate
        for public_key in sorted(set(electorate.members) - set(newest.members)):
            member = node_id_of(public_key)
            is_spoilt = member in self.view.barred or public_key in self._knowledge.liars
            if electorate.rule == "pinned":
                is_named = member == self._founder or is_nominated(
                    proposal.nomination, member, self._swarm_digest, self._founder
                )
                if not is_named:
                    raise RemoteProtocolError("the founder did not nominate it", "not_nominated")
            elif member not in self.view.eligible and member != self._node_id:
                raise RemoteProtocolError("not known here as fit to be an elector", "not_eligible")
            if is_spoilt:
                raise RemoteProtocolError("something is known against it", "not_eligible")
        for public_key in sorted(set(newest.members) - set(electorate.members)):
            member = node_id_of(public_key)
            is_gone = member in self.view.dead or member in self.view.barred
            # Where members may lie, a lying backbone must not drop the honest ones one by one, nor make
            # three of four: three tolerate no liar.
            count = len(newest.members)
            may_go = is_gone and count != OPEN_MIN
            may_go = may_go or public_key in self._knowledge.liars or count < OPEN_MIN
            if electorate.rule == "open" and not may_go:
                raise RemoteProtocolError("it is not dead for all that is known here", "not_dead")

    def _keep(self, **changes: Any) -> None:
        self._kept = replace(self._kept, **changes)
        self.is_changed = True


def read_promises(data: bytes) -> tuple[StoredPromises, Vote | None, Proposal | None, Prepared | None]:
    """What the slot `election` holds, and in it the last vote, assent and endorsed electorate.

    Raises `RemoteProtocolError` for what cannot be read.
    """
    kept = decode(data, STORED_PROMISES)
    vote = decode(decode(kept.vote, SIGNED).payload, VOTE) if kept.vote else None
    assented = decode(kept.assented, PROPOSAL) if kept.assented else None
    return kept, vote, assented, peek_prepared(kept.prepared) if kept.prepared else None
