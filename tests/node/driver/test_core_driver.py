"""The core driver on twins in memory and a mock clock: real cores, real codec, no network and no disk."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from kvasir_node.driver.core_driver import CoreDriver
from kvasir_node.driver.last_error import LastError
from kvasir_node.net.core_stream import CoreStreams
from kvasir_node.net.dialler import Dialler
from kvasir_node.ports import Claim
from kvasir_proto.codec import decode
from kvasir_proto.effects import Now, Slot
from kvasir_proto.election.requests import LeaseHeld, StepDown, TermFollowed
from kvasir_proto.election.states import Role
from kvasir_proto.errors import DiskFull, RemoteProtocolError
from kvasir_proto.gossip_rules import is_announcement, is_record, record_in_store
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.membership.events import Leave, MemberChanged, Seed
from kvasir_proto.messages.core import CORE, MEMBERSHIP_MESSAGES
from kvasir_proto.messages.election import ElectorateEndorsement, LeaseRequest, VoteGrant, VoteRequest
from kvasir_proto.messages.plan import PlanAccept, PlanOffer
from kvasir_proto.node_core import LAN, NodeCore, PlanReceived, ShardLoaded
from kvasir_proto.records import RecordChanged
from tests.node.driver.memory_network import MemoryHost, MemoryNetwork
from tests.node.net.memory_gossip import MemoryGossipNetwork, MemoryRecordNetwork, MemoryRecordStore
from tests.proto.small_swarm import MODEL, WALL, capability, found, key_of


def clocks() -> Now:
    elapsed = round(trio.current_time() * 1e9)
    return Now(Instant(elapsed), WallTime(WALL + elapsed))


class World:
    """What all nodes share."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork(nursery)
        self.gossip = MemoryGossipNetwork(nursery)
        self.records = MemoryRecordNetwork()
        self.swarm = found(key_of(1))
        self.founder: Member | None = None

    async def start(self, number: int) -> Member:
        member = Member(self, number)
        await member.start()
        return member


class OverheardStreams(CoreStreams):
    """Remembers what the node says on them."""

    def __init__(self, host: MemoryHost, dialler: Dialler) -> None:
        super().__init__(host, dialler)
        self.said: list[Any] = []

    def send(self, node_id: NodeId, body: bytes) -> bool:
        with contextlib.suppress(RemoteProtocolError):
            self.said.append(decode(body, CORE))
        return super().send(node_id, body)


class Member:
    """One node: its core, driven."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.key = key_of(number)
        self.saved: dict[Slot, bytes] = {}
        self.order: list[str] = []
        self.fails: Callable[[Slot], bool] = lambda _: False
        self.attempts: list[Slot] = []
        self.told: list[Any] = []
        self.said: list[Any] = []
        self.node_id = NodeId("")
        self.host: MemoryHost

    async def start(self) -> None:
        world = self.world
        self.node_id = node_id_of(self.key.public_key().public_bytes_raw())
        host = self.host = world.network.host(self.node_id)
        dialler = self.dialler = Dialler(host)
        streams = OverheardStreams(host, dialler)
        self.said = streams.said
        await world.nursery.start(streams.run)
        swarm = world.swarm

        def judge(data: bytes) -> Claim | None:
            opened = record_in_store(data, swarm.digest, clocks().wall)
            return None if opened is None else Claim(opened.said.node_id, opened.said.sequence)

        self.last_error = LastError(lambda: clocks().wall)
        core = NodeCore(
            private_key=self.key,
            swarm=swarm,
            capability=capability(self.node_id, addresses=host.addresses()),
            model=MODEL,
            options=LAN,
            stored=self.saved,
            entropy=random.Random(f"{self.node_id} {host.addresses()}"),
            now=clocks(),
        )
        accept = {"records": lambda data: is_record(data, swarm), "terms": is_announcement}
        self.driver = CoreDriver(
            core,
            streams=streams,
            gossip=world.gossip.join(self.node_id, accept),  # type: ignore[arg-type]
            record_store=MemoryRecordStore(world.records, judge),
            save=self._save,
            clocks=clocks,
            last_error=self.last_error,
        )
        world.nursery.start_soon(self.driver.run)
        world.nursery.start_soon(self._hear)
        if world.founder is None:
            world.founder = self
        founder = world.founder
        dialler.learn(founder.node_id, founder.host.addresses(), "told")
        self.driver.command(Seed((founder.node_id,)))

    async def _save(self, slot: Slot, data: bytes) -> None:
        await trio.sleep(0.002)
        self.attempts.append(slot)
        if self.fails(slot):
            raise DiskFull(f"no room for {slot}")
        self.saved[slot] = data

    async def _hear(self) -> None:
        async for event in self.driver.events:
            self.told.append(event)
            if isinstance(event, RecordChanged) and event.record is not None:
                self.dialler.learn(event.node_id, event.record.addresses, "record")
            if isinstance(event, PlanReceived):
                plan = event.plan
                await trio.sleep(0.05)
                self.driver.command(ShardLoaded(plan.epoch, plan.term, plan.revision, 1))

    def is_ready(self) -> bool:
        return self.driver.view().state == "ready"


async def _until(condition: Callable[[], bool], timeout_s: float = 30.0) -> float:
    started = trio.current_time()
    with trio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - nobody tells: it is what cores believe
            await trio.sleep(0.05)
    return trio.current_time() - started


async def test_members_find_each_other_elect_and_place(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        members = [await world.start(number) for number in (1, 2, 3, 4)]
        assert await _until(lambda: all(each.is_ready() for each in members)) < 15
        views = [each.driver.view() for each in members]
        assert len({view.fence for view in views}) == 1
        assert [view.role for view in views].count(Role.BACKBONE) == 1
        assert all(any(isinstance(each, TermFollowed) for each in member.told) for member in members)
        nursery.cancel_scope.cancel()


async def test_nothing_is_said_before_what_it_promises_is_saved(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A node whose disk is full neither votes nor has a lease, and goes on when there is room."""
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        founder = Member(world, 1)
        is_full = True
        founder.fails = lambda _: is_full
        await founder.start()
        await trio.sleep(20)
        assert founder.saved == {}
        assert not any(isinstance(each, LeaseHeld | TermFollowed) for each in founder.told)
        assert "no room" in founder.last_error.unrecovered
        is_full = False
        await _until(lambda: any(isinstance(each, LeaseHeld) for each in founder.told))
        assert {"election", "fence", "incarnation", "records"} <= set(founder.saved)
        nursery.cancel_scope.cancel()


async def test_a_full_disk_silences_nobody(autojump_clock: trio.testing.MockClock) -> None:
    """The backbone's disk is full for five minutes: only what promises nothing is due, so it goes on."""
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        members = [await world.start(number) for number in (1, 2, 3)]
        await _until(lambda: all(each.is_ready() for each in members))
        await trio.sleep(5)
        fence = members[0].driver.view().fence
        assert fence is not None
        backbone = next(each for each in members if each.node_id == fence.backbone)
        others = [each for each in members if each is not backbone]
        is_full = True
        backbone.fails = lambda _: is_full
        kept = dict(backbone.saved)
        backbone.attempts.clear()
        for each in others:
            each.told.clear()
        await trio.sleep(300)
        assert {"records"} == set(backbone.attempts), "what this test is about did not happen"
        assert 10 <= len(backbone.attempts) <= 30, "it is tried again, and not in a hurry"
        assert backbone.saved == kept
        assert not [one for each in others for one in each.told if isinstance(one, MemberChanged)]
        assert {each.driver.view().fence for each in members} == {fence}
        view = backbone.driver.view()
        assert view.lease_until is not None
        assert view.lease_until > clocks().instant
        assert (view.state, view.reason) == ("degraded", "no room for records")
        is_full = False
        await _until(backbone.is_ready)
        assert backbone.saved != kept
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "slot, withheld",
    [
        ("election", (VoteGrant, VoteRequest, ElectorateEndorsement)),
        ("fence", (LeaseRequest, PlanOffer, PlanAccept)),
        ("incarnation", MEMBERSHIP_MESSAGES),
    ],
)
async def test_what_rests_on_an_unsaved_slot_is_not_said(
    autojump_clock: trio.testing.MockClock, slot: Slot, withheld: tuple[type, ...]
) -> None:
    """From its start one slot of a member cannot be saved; then the member that was backbone ends."""
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        first, second = [await world.start(number) for number in (1, 2)]
        third = Member(world, 3)
        third.fails = lambda each: each == slot
        await third.start()
        await trio.sleep(60)
        first.driver.command(StepDown("for the test"))
        await trio.sleep(60)
        assert slot in third.attempts, "what this test is about did not happen"
        assert slot not in third.saved
        assert not [each for each in third.said if isinstance(each, withheld)]
        if slot == "fence":
            assert not any(isinstance(each, TermFollowed | PlanReceived) for each in third.told)
        if slot != "incarnation":
            seen = {each.node_id: each.state for each in second.driver.view().members}
            assert seen[third.node_id] == "alive"
        third.fails = lambda _: False
        await trio.sleep(20)
        assert slot in third.saved
        assert [each for each in third.said if isinstance(each, withheld)]
        nursery.cancel_scope.cancel()


async def test_a_copied_home_ends_as_conflicted_in_both_processes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        members = [await world.start(number) for number in (1, 2, 3, 4)]
        await _until(lambda: all(each.is_ready() for each in members))
        original = members[1]
        clone = Member(world, 2)
        clone.saved = dict(original.saved)
        await clone.start()
        both = (original, clone)
        took = await _until(lambda: {each.driver.view().state for each in both} == {"conflicted"}, 60)
        assert took < 30
        for each in both:
            assert "is its home a copy of this one" in each.driver.view().reason
            assert "Start it again" in each.driver.view().reason
        rest = [each for each in members if each is not original]

        def condition_seen_by(one: Member) -> str:
            return {each.node_id: each.condition for each in one.driver.view().members}[original.node_id]

        await _until(lambda: all(condition_seen_by(each) == "conflicted" for each in rest))
        await _until(lambda: all(each.is_ready() for each in rest))
        nursery.cancel_scope.cancel()


async def test_a_goodbye_has_been_handed_to_the_network_when_flush_returns(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        first, second = [await world.start(number) for number in (1, 2)]
        await _until(lambda: len(first.driver.view().members) == 1)
        second.driver.command(Leave("the node stops"))
        await second.driver.flush()
        await trio.sleep(1)
        assert [each.state for each in first.driver.view().members] == ["left"]
        nursery.cancel_scope.cancel()


async def test_garbage_costs_its_sender_and_nothing_else(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        world = World(nursery)
        first, second = [await world.start(number) for number in (1, 2)]
        await _until(lambda: len(first.driver.view().members) == 1)
        for body in (b"x", b"\xff" * 100, b"\x80"):
            second.driver._streams.send(first.node_id, body)
        await trio.sleep(5)
        assert [each.state for each in first.driver.view().members] == ["alive"]
        nursery.cancel_scope.cancel()
