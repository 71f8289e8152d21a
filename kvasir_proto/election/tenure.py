"""A backbone's time in office: how long its lease runs, and which electorate it is making.

Counts grants and endorsements. A lease granted by the electorate before is good until it ends, because the
next electorate cannot act without one of its electors; but the one after that could. So a second change waits
until the electorate of the first has granted a lease of its own.
"""

from __future__ import annotations

from kvasir_proto.codec import decode, encode
from kvasir_proto.election.configuration import Proposal, commits, make_link, successor_of
from kvasir_proto.election.lease import usable_until
from kvasir_proto.election.prepared import Prepared, make_prepared, open_prepared, verify_assent
from kvasir_proto.election.quorum import instant_of_quorum
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of, public_key_of
from kvasir_proto.instants import Duration, Instant
from kvasir_proto.messages.election import AssentRequest, ElectorateProposal
from kvasir_proto.signing import SIGNED, Signed, verify
from kvasir_proto.term_proof import ENDORSEMENT, Electorate, Endorsement, ProvenTerm

_REQUESTS_MAX = 16
"""Lease requests whose grants still count: more than a lease has."""


class Tenure:
    """The term that this node won, until it ends. `unfinished` is a prepared electorate, to finish first."""

    def __init__(
        self,
        swarm_digest: SwarmDigest,
        term: ProvenTerm,
        electorate: Electorate,
        lease: Duration,
        unfinished: Prepared | None,
    ) -> None:
        self._swarm_digest = swarm_digest
        self._lease = lease
        self.term = term
        self.electorate = electorate
        self.until: Instant | None = None
        self.number = 0
        self.announcements = 0
        self._asked: dict[int, Instant] = {}
        self._granted: dict[bytes, Instant] = {}
        self.knows_proof: set[NodeId] = set()
        self._is_confirmed = False
        self._unfinished = unfinished
        self._wanted: tuple[tuple[bytes, ...], bytes] | None = None
        self.proposal: Proposal | None = None
        self._number = 0
        self._passed_over = (0, 0, 0)
        self._assents: dict[bytes, Signed] = {}
        self._prepared = b""
        self._endorsements: dict[bytes, Signed] = {}

    # --- the lease ------------------------------------------------------------------------------------------

    def ask(self, now: Instant) -> int:
        """The number of the request that is sent now."""
        self.number += 1
        self._asked[self.number] = now
        self._asked.pop(self.number - _REQUESTS_MAX, None)
        return self.number

    def take_grant(self, elector: NodeId, number: int) -> bool:
        """Count the grant of a request. Says whether the lease got longer."""
        public_key = public_key_of(elector)
        asked = self._asked.get(number)
        if asked is None or public_key not in self.electorate.members:
            return False
        self.knows_proof.add(elector)
        self._granted[public_key] = max(asked, self._granted.get(public_key, asked))
        reached = instant_of_quorum(
            (self._granted[each] for each in sorted(self._granted)), self.electorate.quorum
        )
        if reached is None:
            return False
        self._is_confirmed = True
        until = usable_until(reached, self._lease)
        if self.until is not None and until <= self.until:
            return False
        self.until = until
        return True

    def adopt_electorate(self, electorate: Electorate) -> None:
        """Another electorate is the newest one. Only grants asked for after this count under it."""
        self.electorate = electorate
        self._asked.clear()
        self._granted.clear()
        self.knows_proof.clear()
        self._is_confirmed = False
        if self._unfinished is not None and self._unfinished.electorate.predecessor != electorate.digest():
            self._unfinished = None
        if self.proposal is not None and self.proposal.electorate.predecessor != electorate.digest():
            self._forget_proposal()
        if self._wanted is not None and self._wanted[0] == electorate.members:
            self._wanted = None

    # --- the next electorate --------------------------------------------------------------------------------

    def want(self, members: tuple[bytes, ...], nomination: bytes) -> bool:
        """Ask for these electors. False if it is more than one change, or one that is under way."""
        if self.proposal is not None or len(set(members) ^ set(self.electorate.members)) != 1 or not members:
            return False
        self._wanted = (tuple(sorted(members)), nomination)
        return True

    @property
    def is_changing(self) -> bool:
        """Whether another electorate is asked for or proposed."""
        return self.proposal is not None or self._wanted is not None

    def drop_unanswered(self) -> frozenset[NodeId] | None:
        """Forget a proposal that no elector has endorsed but the one added, and say who would have come or
        gone. None where there is none to forget.

        What was to be finished and cannot be prepared again may be committed by nobody, so something else
        gets its turn, and then it again: what electors are locked on they say.
        """
        if self.proposal is None or self._is_old_asked():
            return None
        self._passed_over = self._unfinished.proposal.ballot if self._unfinished is not None else (0, 0, 0)
        changed = set() if self._is_finishing() else self._changed()
        self._unfinished = None
        self._wanted = None
        self._forget_proposal()
        return frozenset(map(node_id_of, changed))

    def _changed(self) -> set[bytes]:
        assert self.proposal is not None
        return set(self.proposal.electorate.members) ^ set(self.electorate.members)

    def _forget_proposal(self) -> None:
        self.proposal = None
        self._prepared = b""
        self._assents.clear()
        self._endorsements.clear()

    def propose(self) -> bool:
        """Begin the next proposal, if there is one to make. Says whether it began."""
        if self.proposal is not None or not self._is_confirmed:
            return False
        electorate, term = self.electorate, self.term.term
        if self._unfinished is not None:
            earlier = self._unfinished.proposal
            self._begin(earlier.electorate, earlier.nomination)
        elif self._wanted is None:
            return False
        elif electorate.term != term:
            # Made by another backbone: committed once more in this term before it is changed.
            self._begin(successor_of(electorate, electorate.members, term), b"")
        else:
            members, nomination = self._wanted
            if len(set(members) ^ set(electorate.members)) != 1:
                self._wanted = None
                return False
            self._begin(successor_of(electorate, members, term), nomination)
        return True

    def _begin(self, electorate: Electorate, nomination: bytes) -> None:
        self._number += 1
        self.proposal = Proposal(self.term.epoch, self.term.term, self._number, electorate, nomination)

    def proposal_message(self, proof: bytes) -> AssentRequest | ElectorateProposal:
        """What `to_ask` are to be asked, with the proof of this backbone under the present electorate."""
        assert self.proposal is not None
        if self._prepared:
            return ElectorateProposal(self._prepared, proof)
        earlier = encode(self._unfinished) if self._unfinished is not None else b""
        return AssentRequest(encode(self.proposal), proof, earlier)

    @property
    def to_ask(self) -> tuple[NodeId, ...]:
        """Who should answer and has not, in the order of their keys.

        First all are asked to assent, which binds nobody to this electorate: an elector that some hold for
        dead, and that comes back before the others do too, would else keep every later change from being
        made. What is prepared the one who would be added endorses first, alone. If it never answers, no
        elector has endorsed anything and the proposal can be dropped: a founder that took in a second
        elector which is not there could never make another electorate.
        """
        if self.proposal is None:
            return ()
        present, members = set(self.electorate.members), set(self.proposal.electorate.members)
        if not self._prepared:
            return tuple(node_id_of(each) for each in sorted(members | present) if each not in self._assents)
        asked = members | present if self._is_old_asked() else members - present
        return tuple(node_id_of(each) for each in sorted(asked) if each not in self._endorsements)

    def _is_finishing(self) -> bool:
        """Whether the proposal is of what an earlier backbone left: nothing else is proposed before that."""
        return self._unfinished is not None

    def _is_old_asked(self) -> bool:
        assert self.proposal is not None
        return bool(self._prepared) and (self._is_finishing() or self._added() <= self._endorsements.keys())

    def _added(self) -> set[bytes]:
        assert self.proposal is not None
        return set(self.proposal.electorate.members) - set(self.electorate.members)

    def take_assent(self, data: bytes, sender: NodeId) -> bool:
        """Count an assent. Says whether that prepared the electorate, so that there is something else to ask.

        The one who would be added has to be among those who assent, but for one that is to be finished.
        Raises `RemoteProtocolError` for a bad one.
        """
        proposal, public_key = self.proposal, public_key_of(sender)
        if proposal is None or self._prepared or public_key in self._assents:
            return False
        signed = self._signed_by(data, public_key)
        verify_assent(signed, self._swarm_digest, proposal, self.term.backbone)
        self._assents[public_key] = signed
        is_prepared = commits(set(self._assents), proposal.electorate, self.electorate)
        if is_prepared and (self._is_finishing() or self._added() <= self._assents.keys()):
            self._prepared = make_prepared(proposal, self.term.backbone, self._assents.values())
        return bool(self._prepared)

    def take_refusal(self, data: bytes) -> bool:
        """An elector endorsed something else in this place. Says whether that is to be finished first now.

        Raises `RemoteProtocolError` as `open_prepared` does.
        """
        if self.proposal is None or self._prepared:
            return False
        prepared = open_prepared(data, self.electorate, self._swarm_digest)
        ballot = prepared.proposal.ballot
        if ballot <= self._passed_over:
            return False
        if self._unfinished is not None and ballot <= self._unfinished.proposal.ballot:
            return False
        self._unfinished = prepared
        self._forget_proposal()
        return True

    def take_endorsement(self, data: bytes, sender: NodeId) -> bytes | None:
        """Count an endorsement; the encoded link once there are enough. Raises `RemoteProtocolError`."""
        public_key = public_key_of(sender)
        if self.proposal is None or public_key in self._endorsements:
            return None
        electorate = self.proposal.electorate
        signed = self._signed_by(data, public_key)
        expected = Endorsement(
            self.term.epoch, self.term.term, self.proposal.number, self.term.backbone, electorate.digest()
        )
        if decode(signed.payload, ENDORSEMENT) != expected:
            return None  # of the proposal before this one
        verify(signed, Endorsement.kind, self._swarm_digest)
        self._endorsements[public_key] = signed
        if not commits(set(self._endorsements), electorate, self.electorate):
            return None
        return make_link(electorate, self.term, self.proposal.number, self._endorsements.values())

    def _signed_by(self, data: bytes, public_key: bytes) -> Signed:
        """An assent or endorsement of that elector, old or new; its signature is still to be verified."""
        assert self.proposal is not None
        signed = decode(data, SIGNED)
        if signed.signer != public_key or public_key not in {
            *self.proposal.electorate.members,
            *self.electorate.members,
        }:
            raise RemoteProtocolError("it is by somebody who has no vote", "not_an_elector")
        return signed
