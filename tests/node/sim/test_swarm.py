"""The event queue and its parts on a toy core: order, clocks, disks, the network, the mesh."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.sim.clocks import NodeClock
from kvasir_node.sim.faults import FAULTS, FaultSchedule, clock_with, fault_names, faults_with, network_with
from kvasir_node.sim.network import QUIET, Network, NetworkOptions
from kvasir_node.sim.store import NodeStore
from kvasir_node.sim.swarm import Durable, SimNode, Swarm, SwarmOptions
from kvasir_proto.effects import Persist, Publish, Send
from kvasir_proto.errors import UsageError
from kvasir_proto.instants import Duration, Instant, milliseconds, seconds
from kvasir_proto.messages import Message
from tests.node.sim.toy_core import Here, Say, ToyCore, ToyKit

PERFECT = replace(QUIET, delay_min=milliseconds(1), delay_mean=milliseconds(1))


def make_swarm(count: int, *, witness: Any = None, trace: Any = None, **options: Any) -> Swarm:
    options.setdefault("network", PERFECT)
    swarm = Swarm(SwarmOptions(seed=options.pop("seed", 1), **options), ToyKit(), witness, trace)
    for _ in range(count):
        swarm.add_node()
    for node in swarm.nodes:
        swarm.start(node, (swarm.nodes[0].node_id,) if node.index else ())
    return swarm


def core_of(node: SimNode) -> ToyCore:
    assert isinstance(node.core, ToyCore)
    return node.core


# --- clocks -------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 10**15),
    st.integers(-50_000, 50_000),
    st.integers(0, 10**13),
    st.integers(0, 10**13),
)
def test_a_deadline_comes_at_the_first_moment_the_clock_shows_it(
    start: int, drift: int, real: int, ahead: int
) -> None:
    clock = NodeClock(Instant(start), drift)
    deadline = Instant(clock.instant(real) + ahead)
    due = clock.real_of(deadline)
    assert clock.instant(due) >= deadline
    assert clock.instant(due - 1) < deadline or due <= real


def test_a_clock_that_changes_its_speed_does_not_jump_and_a_booted_one_begins_again() -> None:
    clock = NodeClock(Instant(5), 50_000, seconds(-600))
    before = clock.instant(seconds(10))
    assert before == 5 + seconds(10) * 105 // 100
    clock.set_drift(seconds(10), -50_000)
    assert clock.instant(seconds(10)) == before
    assert clock.instant(seconds(11)) == before + milliseconds(950)
    wall = clock.now(seconds(11)).wall
    clock.step_wall(seconds(600))
    assert clock.now(seconds(11)).wall == wall + seconds(600)
    clock.boot(seconds(12))
    assert clock.instant(seconds(12)) == 0
    assert clock.now(seconds(12)).wall == wall + seconds(601)


# --- disks --------------------------------------------------------------------------------------------------


def test_a_crash_loses_what_was_not_durable_and_keeps_an_order() -> None:
    kept = set()
    for seed in range(40):
        store = NodeStore()
        store.write("fence", b"1", done_at=10)
        store.write("fence", b"2", done_at=20)
        store.write("plan", b"3", done_at=30)
        store.crash(15, Random(seed))
        stored = store.stored()
        kept.add((stored.get("fence"), stored.get("plan")))
        assert store.pending_count == 0
    assert kept == {(b"1", None), (b"2", None), (b"2", b"3")}


def test_what_a_drain_says_leaves_after_its_writes_and_so_does_what_is_said_later() -> None:
    order: list[tuple[int, str]] = []

    class Recorder:
        def saw(self, real: int, node: SimNode, event: object) -> None:
            if node.index == 1 and isinstance(event, Durable):
                order.append((real, event.slot))

    swarm = make_swarm(2, witness=Recorder())
    swarm.run_until(seconds(1))
    order.clear()

    def note(sender: int, to: int, message: Message) -> bool:
        order.append((swarm.now, message.kind))
        return True

    swarm.network.filters.append(note)
    one, start = swarm.nodes[1], swarm.now
    to = swarm.nodes[0].node_id
    swarm.command(one, Say((Send(to, Here(7)), Persist("plan", b"x"))))
    swarm.command(one, Say((Send(to, Here(8)),)))
    swarm.run_until(start + milliseconds(100))
    mine = [what for _, what in order]
    assert mine[:3] == ["here", "plan", "here"] or mine[:3] == ["plan", "here", "here"]
    assert order[0][0] >= start + swarm.options.fsync_min


def test_a_crash_before_the_write_is_done_takes_the_message_with_it() -> None:
    swarm = make_swarm(2)
    swarm.run_until(seconds(1))
    one, zero = swarm.nodes[1], swarm.nodes[0]
    swarm.command(one, Say((Persist("plan", b"x"), Send(zero.node_id, Here(99)))))
    swarm.crash(one)
    swarm.run_until(seconds(2))
    assert (one.node_id, Here(99)) not in core_of(zero).received
    assert core_of(zero).lost == [one.node_id]
    swarm.start(one)
    assert core_of(one).starts == 2


def test_what_is_said_after_a_pause_stays_behind_what_waited_for_the_disk_before_it() -> None:
    """Else a node said an incarnation, and after it the lower one of a drain that the pause held up."""
    swarm = make_swarm(2)
    swarm.run_until(seconds(1))
    one, zero = swarm.nodes[1], swarm.nodes[0]
    said: list[int] = []

    def note(sender: int, to: int, message: Message) -> bool:
        if isinstance(message, Here) and message.starts > 50:
            said.append(message.starts)
        return True

    swarm.network.filters.append(note)
    swarm.pause(one, loses=False)
    swarm.command_later(one, milliseconds(1), Say((Send(zero.node_id, Here(99)),)))
    swarm.command(one, Say((Persist("plan", b"x"), Send(zero.node_id, Here(98)))))
    swarm.run_until(seconds(3))
    swarm.resume(one)
    swarm.run_until(seconds(4))
    assert said == [98, 99]


# --- time ---------------------------------------------------------------------------------------------------


def test_timers_run_by_the_nodes_own_clock() -> None:
    swarm = Swarm(SwarmOptions(seed=1, network=PERFECT), ToyKit())
    for drift in (0, 50_000, -50_000):
        swarm.add_node(NodeClock(Instant(1_000_000), drift))
    for node in swarm.nodes:
        swarm.start(node, (swarm.nodes[0].node_id,) if node.index else ())
    swarm.run_until(seconds(100))
    fast, slow = (swarm.nodes[index].messages_sent for index in (1, 2))
    assert fast == pytest.approx(210, abs=2)
    assert slow == pytest.approx(190, abs=2)


def test_a_paused_node_says_nothing_and_finds_what_waited() -> None:
    for loses in (False, True):
        swarm = make_swarm(3)
        swarm.run_until(seconds(2))
        one = swarm.nodes[1]
        sent, heard = one.messages_sent, len(core_of(one).received)
        swarm.pause(one, loses=loses)
        swarm.run_until(seconds(12))
        assert (one.messages_sent, len(core_of(one).received)) == (sent, heard)
        swarm.resume(one)
        assert (len(core_of(one).received) > heard) is not loses
        swarm.run_until(seconds(14))
        assert one.messages_sent > sent


def test_one_seed_gives_one_log_whatever_the_hash_seed() -> None:
    program = (
        "import hashlib, tests.node.sim.test_swarm as here; "
        "print(hashlib.sha256(here.log_of_a_bad_day(5).encode()).hexdigest())"
    )
    logs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1", "77")
    }
    assert len(logs) == 1
    assert log_of_a_bad_day(5) != log_of_a_bad_day(6)


def log_of_a_bad_day(seed: int, end_s: int = 60) -> str:
    """Every fault there is, on a dozen toys."""
    trace = io.StringIO()
    swarm = Swarm(SwarmOptions(seed=seed, network=network_with(QUIET, FAULTS)), ToyKit(), trace=trace)
    faults = faults_with(FAULTS, node_count=12)
    clocks = swarm.randomness("clocks")

    def join() -> None:
        swarm.start(swarm.add_node(clock_with(faults, clocks)), (swarm.nodes[0].node_id,))

    schedule = FaultSchedule(swarm, faults, join, lambda _, __: True, node_count=12)
    for _ in range(12):
        swarm.add_node(clock_with(faults, clocks))
    for node in swarm.nodes:
        swarm.start(node, (swarm.nodes[0].node_id,) if node.index else ())
    schedule.begin()
    swarm.run_until(seconds(end_s))
    schedule.heal()
    swarm.run_until(seconds(end_s + 10))
    assert {node.index for node in schedule.core()} <= {node.index for node in swarm.nodes if node.is_up}
    return trace.getvalue()


def test_a_bad_day_has_all_its_faults_and_ends() -> None:
    log = log_of_a_bad_day(7, end_s=200)
    for event in (
        "crashed",
        "restarted",
        "paused",
        "resumed",
        "parted",
        "refused",
        "wall_clock_set",
        "healed",
    ):
        assert f" {event}" in log, event
    after = log[log.index(" healed") :]
    for event in ("crashed", "paused", "parted", "refused"):
        assert f" {event}" not in after, event


# --- the network --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, share, copies",
    [
        (replace(QUIET, loss=0.25), 0.75, 0.75),
        (replace(QUIET, duplicate=0.25), 1.0, 1.25),
        (replace(QUIET, corrupt=0.5), 1.0, 1.0),
    ],
)
def test_packets_are_lost_and_doubled_as_often_as_said(
    options: NetworkOptions, share: float, copies: float
) -> None:
    network = Network(options, Random(3))
    network.add_node()
    network.add_node()
    fates = []
    for number in range(4000):
        fate = network.route(number, 0, 1)
        for _ in fate:
            network.arrived(0, 1)
        fates.append(fate)
    assert sum(map(bool, fates)) / 4000 == pytest.approx(share, abs=0.03)
    assert sum(map(len, fates)) / 4000 == pytest.approx(copies, abs=0.03)
    bad = sum(each.corrupted for fate in fates for each in fate)
    assert bad / sum(map(len, fates)) == pytest.approx(options.corrupt, abs=0.03)
    waits = [each.at - number for number, fate in enumerate(fates) for each in fate]
    assert min(waits) >= options.delay_min
    assert sum(waits) / len(waits) == pytest.approx(options.delay_mean, rel=0.1)


def test_a_reordered_packet_is_overtaken_and_a_clogged_path_delivers_at_once() -> None:
    network = Network(replace(QUIET, reorder=0.5), Random(1))
    for _ in range(2):
        network.add_node()
    times = [network.route(milliseconds(number), 0, 1)[0].at for number in range(100)]
    assert times != sorted(times)
    clogged = Network(replace(QUIET, clog=1.0, clog_mean=seconds(10)), Random(1))
    for _ in range(2):
        clogged.add_node()
    first = clogged.route(0, 0, 1)[0].at
    assert first > milliseconds(100)
    assert clogged.route(1, 0, 1)[0].at >= first


def test_a_full_path_loses_what_is_over() -> None:
    network = Network(replace(QUIET, path_capacity=3), Random(1))
    for _ in range(2):
        network.add_node()
    fates = [network.route(0, 0, 1) for _ in range(5)]
    assert [len(fate) for fate in fates] == [1, 1, 1, 0, 0]
    network.arrived(0, 1)
    assert len(network.route(0, 0, 1)) == 1


def test_partitions_cut_both_ways_or_one_and_end() -> None:
    network = Network(QUIET, Random(1))
    for _ in range(4):
        network.add_node()
    network.part({0, 1})
    assert network.is_cut(0, 2)
    assert network.is_cut(2, 1)
    assert not network.is_cut(0, 1)
    assert not network.is_cut(2, 3)
    network.part({0, 1}, one_way=True)
    assert network.is_cut(0, 2)
    assert not network.is_cut(2, 0)
    network.join()
    network.cut(2, 0)
    assert not network.is_cut(0, 2)
    assert network.is_cut(2, 0)
    network.heal()
    assert not network.is_cut(2, 0)


def test_partitions_drawn_are_of_every_kind() -> None:
    network = Network(network_with(QUIET, ("partition",)), Random(1))
    for _ in range(10):
        network.add_node()
    kinds = {" ".join(network.part_at_random(list(range(10))).split()[:2]) for _ in range(100)}
    assert kinds == {f"{mode} {way}" for mode in ("isolate_one", "split") for way in ("one_way", "both_ways")}


def test_a_refused_message_charges_its_sender_and_reaches_no_core() -> None:
    swarm = make_swarm(2, network=replace(QUIET, corrupt=1.0))
    swarm.run_until(seconds(60))
    assert core_of(swarm.nodes[0]).received == []
    assert swarm.refused_by_codec + swarm.refused_by_transport == swarm.corrupted_count > 100
    assert swarm.nodes[1].charges == swarm.refused_by_codec > 20


# --- the mesh -----------------------------------------------------------------------------------------------


def test_a_publication_reaches_everybody_at_the_measured_cost() -> None:
    swarm = make_swarm(100)
    swarm.run_until(seconds(2))
    one = swarm.nodes[1]
    begin = swarm.now
    swarm.command(one, Say((core_of(one).announce(),)))
    heard: dict[int, int] = {}
    while len(heard) < 99 and swarm.now < begin + seconds(1):
        swarm.run_until(swarm.now + milliseconds(1))
        for node in swarm.nodes:
            if one.node_id in core_of(node).records:
                heard.setdefault(node.index, swarm.now - begin)
    assert sorted(heard) == [index for index in range(100) if index != 1]
    # Two to five hops of 8 to 14 ms and a millisecond of path each.
    assert milliseconds(16) <= min(heard.values()) <= milliseconds(31)
    assert milliseconds(27) <= max(heard.values()) <= milliseconds(90)
    assert swarm.mesh.bytes_count == pytest.approx(100 * 6 * len(core_of(one).record()), rel=0.4)


def test_a_cut_off_node_misses_a_publication_and_fetches_the_record() -> None:
    swarm = make_swarm(6)
    swarm.run_until(seconds(2))
    zero, five = swarm.nodes[0], swarm.nodes[5]
    swarm.network.part({5})
    swarm.command(zero, Say((core_of(zero).announce(),)))
    swarm.run_until(seconds(3))
    assert zero.node_id in core_of(swarm.nodes[1]).records
    assert zero.node_id not in core_of(five).records
    swarm.network.join()
    swarm.run_until(seconds(5))
    assert core_of(five).records[zero.node_id] == core_of(zero).record()


def test_a_flood_is_dropped_and_not_queued_for_ever() -> None:
    swarm = make_swarm(10)
    swarm.run_until(seconds(2))
    flood = tuple(Publish("records", f"{swarm.nodes[1].node_id} {n}".encode()) for n in range(200))
    swarm.command(swarm.nodes[1], Say(flood))
    swarm.run_until(seconds(20))
    assert swarm.mesh.dropped_count > 0


# --- faults -------------------------------------------------------------------------------------------------


def test_faults_are_named() -> None:
    assert fault_names("all") == FAULTS
    assert fault_names("none") == ()
    assert fault_names("skew, loss") == ("loss", "skew")
    with pytest.raises(UsageError, match="weather"):
        fault_names("loss,weather")
    assert faults_with((), 10) == faults_with((), 50)
    assert faults_with(("crash",), 10).crash_gap_mean == 5 * faults_with(("crash",), 50).crash_gap_mean > 0
    assert clock_with(faults_with((), 5), Random(1)).skew == Duration(0)
