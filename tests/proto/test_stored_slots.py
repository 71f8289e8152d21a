"""What is damaged inside a slot is refused by the core, by the name of the slot."""

from __future__ import annotations

from typing import get_args

import pytest

from kvasir_proto.admission import AdmissionKept
from kvasir_proto.codec import encode
from kvasir_proto.effects import Slot, SlotDamaged
from kvasir_proto.election.elector import StoredPromises
from kvasir_proto.election.knowledge import StoredElectorates, StoredFence
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.instants import Instant, seconds
from kvasir_proto.messages.election import Evidence
from kvasir_proto.node_core import FoundOut
from kvasir_proto.stored_slots import check_readable
from kvasir_proto.verdicts_in_force import VerdictInForce
from tests.proto.declared import example_of
from tests.proto.small_swarm import SmallSwarm

UNREADABLE: dict[Slot, bytes] = {
    "election": encode(StoredPromises(b"no", (), 0, 0, b"", b"")),
    "electorate": encode(StoredElectorates(True, (b"no",), ())),
    "fence": encode(StoredFence(b"no")),
}
FORGED: dict[Slot, bytes] = {
    "admission": encode(AdmissionKept((), None, (b"no",), (), ())),
    "electorate": encode(StoredElectorates(True, (), (example_of(Evidence),))),
}


@pytest.mark.parametrize("slot", get_args(Slot))
def test_what_cannot_be_read_is_refused_by_name(slot: Slot) -> None:
    swarm = SmallSwarm(1)
    for data in {b"no", UNREADABLE.get(slot, b"")}:
        with pytest.raises(RemoteProtocolError):
            check_readable(slot, data)
        swarm.node(1).stored = {slot: data}
        with pytest.raises(SlotDamaged) as caught:
            swarm.start(swarm.node(1))
        assert caught.value.slot == slot


@pytest.mark.parametrize("slot", sorted(FORGED))
def test_what_is_signed_by_nobody_is_refused_by_name(slot: Slot) -> None:
    check_readable(slot, FORGED[slot])
    swarm = SmallSwarm(1)
    swarm.node(1).stored = {slot: FORGED[slot]}
    with pytest.raises(SlotDamaged) as caught:
        swarm.start(swarm.node(1))
    assert caught.value.slot == slot


def test_what_a_core_persisted_is_readable() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20))
    core = swarm.node(2).core
    assert core is not None
    verdict = VerdictInForce(swarm.node(3).node_id, "unfit", "3 of 9 rows", Instant(swarm.time), b"")
    core.command(FoundOut(verdict), swarm.now())
    swarm.run(seconds(1))
    seen = {slot for node in swarm.nodes.values() for slot in node.stored}
    assert seen == set(get_args(Slot))
    for node in swarm.nodes.values():
        for slot, data in node.stored.items():
            check_readable(slot, data)
