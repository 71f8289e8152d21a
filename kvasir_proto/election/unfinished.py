"""What earlier backbones left unfinished: electorates that some electors endorsed and nobody saw committed.

The winner of a term must finish one that may be committed before it proposes its own, and may let go of one
that cannot be. Counts who endorsed what, as far as the electors of the present electorate have said so in
this term: whoever said so endorses nothing of an earlier term any more. Knows no keys and no messages.
"""

from __future__ import annotations

from kvasir_proto.election.configuration import Proposal
from kvasir_proto.election.quorum import honest_endorsers_min
from kvasir_proto.term_proof import Electorate


class Unfinished:
    """Of the successors of one electorate: what its members say that they endorsed."""

    def __init__(self, electorate: Electorate) -> None:
        self._electorate = electorate
        self._endorsed: dict[bytes, Proposal | None] = {}

    def hear(self, elector: bytes, endorsed: Proposal | None) -> None:
        """An elector (its public key) says what it endorsed last in this place, if anything."""
        if elector in self._electorate.members:
            self._endorsed.setdefault(elector, endorsed)

    @property
    def proposal(self) -> Proposal | None:
        """The one proposed last that may be committed; None where nothing is to be finished.

        May be: those who said so, those who endorsed a later one and may have endorsed it before, and
        those not heard, are as many as the honest endorsers of a committed one. So what liars have left
        behind holds up nobody, nor what a few endorsed, once the others have said that they did not.
        """
        said = [each for each in self._endorsed.values() if each is not None]
        unheard = len(self._electorate.members) - len(self._endorsed)
        for proposal in sorted(said, key=_order, reverse=True):
            endorsers = sum(
                each.electorate == proposal.electorate or _order(each) > _order(proposal) for each in said
            )
            if endorsers + unheard >= honest_endorsers_min(self._electorate, proposal.electorate):
                return proposal
        return None


def _order(proposal: Proposal) -> tuple[int, int]:
    return (proposal.epoch, proposal.term)
