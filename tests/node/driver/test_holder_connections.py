"""The table of holder connections: what each word, loss and plan makes of a row."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir_node.driver.holder_connections import (
    FAULTY_CODES,
    FAULTY_MAX,
    NO_SHARE,
    QUARANTINE_FIRST,
    QUARANTINE_MAX,
    RETRY_DELAY_MAX_S,
    HolderConnection,
    HolderConnections,
    Share,
)
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Instant, after, between, seconds
from kvasir_proto.manifest import ShardSet
from kvasir_proto.placement.plan import Plan, make_plan, plan_of

BACKBONE, FIRST, SECOND, THIRD = (node_id_of(bytes([number]) * 32) for number in range(4))
LAYERS = (0, 1)
N_EXPERT = 4
NOW = Instant(seconds(1000))
NOTHING = ShardSet()


def plan(*nodes: NodeId, revision: int = 1, holders: int = 1) -> Plan:
    return make_plan(LAYERS, N_EXPERT, nodes, epoch=0, term=1, revision=revision, holders=holders)


def plan_for(*holders: tuple[NodeId, ...], revision: int = 2) -> Plan:
    """Expert e is held by ``holders[e]``, in each layer."""
    return plan_of(
        [holders] * len(LAYERS), LAYERS, epoch=0, term=1, revision=revision, missing=["", ""], degraded=""
    )


def row_of(table: HolderConnections, node_id: NodeId = FIRST) -> HolderConnection:
    row = table.get(node_id)
    assert row is not None
    return row


def connect(table: HolderConnections, node_id: NodeId, now: Instant = NOW, **said: Any) -> HolderConnection:
    """Bring a holder that is ready to serving."""
    row = row_of(table, node_id)
    attempt = table.begin(row, now)
    table.note_connected(row, row.wanted, **{"has_shown_shard": False} | said)
    table.end(row, attempt)
    return row


def serving(*nodes: NodeId) -> tuple[HolderConnections, Plan]:
    table, first = HolderConnections(), plan(*nodes)
    table.follow(first, BACKBONE, NOW)
    for node_id in nodes:
        if node_id != BACKBONE:
            table.note_ready(node_id, 1)
            connect(table, node_id)
    return table, first


def lose(table: HolderConnections, node_id: NodeId, code: str = "late", now: Instant = NOW) -> bool:
    return table.note_lost(node_id, code, "no reply", now, is_engines_word=True)


def test_a_holder_is_due_once_it_has_said_that_it_serves() -> None:
    table = HolderConnections()
    table.follow(plan(FIRST, SECOND), BACKBONE, NOW)
    assert (table.due(NOW), table.next_due()) == ([], None)
    table.note_ready(SECOND, 7)
    table.note_ready(THIRD, 7)  # the plan does not name it
    assert [row.node_id for row in table.due(NOW)] == [SECOND]
    assert row_of(table, SECOND).memory_bytes == 7
    connect(table, SECOND)
    assert (table.due(NOW), table.connected()) == ([], [SECOND])


def test_the_backbone_is_none_of_its_own_holders() -> None:
    table = HolderConnections()
    both = plan(BACKBONE, FIRST)
    table.follow(both, BACKBONE, NOW)
    assert [row.node_id for row in table] == [FIRST]
    table.note_ready(FIRST, 1)
    connect(table, FIRST)
    own = both.shard_of(BACKBONE)
    assert table.coverage(both, BACKBONE, NOTHING).n_pairs_held == 4
    assert table.coverage(both, BACKBONE, own).n_pairs_held == 8
    assert (len(table.held(NOTHING)), len(table.held(own))) == (4, 8)
    older = both.shard_of(FIRST)
    assert table.coverage(both, BACKBONE, older).n_pairs_held == 4, "that is not what the plan gives it"


def test_who_is_named_for_nothing_is_not_connected() -> None:
    many = [node_id_of(bytes([number]) * 32) for number in range(1, 13)]
    table, crowded = HolderConnections(), plan(*many)
    table.follow(crowded, BACKBONE, NOW)
    for node_id in many:
        table.note_ready(node_id, 1)
    assert {row.node_id for row in table.due(NOW)} == {
        node_id for node_id in many if len(crowded.shard_of(node_id))
    }
    assert len(table.due(NOW)) < len(many)


def test_a_new_plan_leaves_alone_whose_share_is_the_same() -> None:
    table, first = serving(FIRST, SECOND)
    table.follow(plan(FIRST, SECOND, revision=2), BACKBONE, NOW)
    table.note_ready(FIRST, 1)
    assert table.due(NOW) == []
    assert table.coverage(first, BACKBONE, NOTHING).n_pairs_held == first.coverage().n_pairs


def test_a_changed_share_is_connected_once_it_is_served_and_the_old_one_is_asked_until_then() -> None:
    table, _ = serving(FIRST, SECOND)
    row = row_of(table)
    before = row.connected
    after_it = plan_for((FIRST,), (FIRST,), (FIRST,), (SECOND,))
    table.follow(after_it, BACKBONE, NOW)
    assert (row.state, row.connected, table.due(NOW)) == ("serving", before, [])
    assert table.coverage(after_it, BACKBONE, NOTHING).n_pairs_held == 0, "neither is connected for it yet"
    table.note_ready(FIRST, 1)
    assert table.due(NOW) == [row]
    assert row.connected == before
    connect(table, FIRST)
    assert row.connected == Share.of(after_it, FIRST)


def test_a_holder_that_says_it_twice_is_connected_anew() -> None:
    table, _ = serving(FIRST)
    table.note_ready(FIRST, 1)
    assert table.due(NOW) == [row_of(table)]
    connect(table, FIRST)
    assert table.due(NOW) == []


def test_who_is_not_named_any_more_goes_when_the_others_are_there() -> None:
    table, _ = serving(FIRST, SECOND)
    for_others = plan_for((FIRST,), (FIRST,), (THIRD,), (THIRD,))
    table.follow(for_others, BACKBONE, NOW)
    assert row_of(table, SECOND).wanted == NO_SHARE
    assert table.superfluous(for_others, BACKBONE, NOTHING) == []
    table.note_ready(THIRD, 1)
    connect(table, THIRD)
    assert table.superfluous(for_others, BACKBONE, NOTHING) == [SECOND]
    table.forget(SECOND)
    assert [row.node_id for row in table] == sorted([FIRST, THIRD])


def test_who_is_not_named_any_more_and_is_not_connected_goes_at_once() -> None:
    table = HolderConnections()
    table.follow(plan(FIRST, SECOND), BACKBONE, NOW)
    table.follow(plan(FIRST, revision=2), BACKBONE, NOW)
    assert [row.node_id for row in table] == [FIRST]


def test_losses_in_a_row_make_the_delay_grow_up_to_a_bound_and_steady_service_ends_it() -> None:
    table, _ = serving(FIRST)
    now, delays = NOW, []
    for _ in range(8):
        assert lose(table, FIRST, now=now)
        row = row_of(table)
        assert (row.state, row.reason, row.is_ready) == ("unreachable", "late: no reply", False)
        table.note_ready(FIRST, 1)
        assert row.state == "unreachable", "it is, until it is connected"
        delays.append((row.retry_at - now) / 1e9)
        assert table.due(Instant(row.retry_at - 1)) == []
        assert table.next_due() == row.retry_at
        now = row.retry_at
        assert table.due(now) == [row]
        connect(table, FIRST, now)
    assert delays == [1, 2, 4, 8, *[RETRY_DELAY_MAX_S] * 4]
    now = after(now, seconds(61))
    lose(table, FIRST, now=now)
    assert row_of(table).retry_at == after(now, seconds(1))


@pytest.mark.parametrize("code", sorted(FAULTY_CODES))
def test_only_the_engines_word_quarantines_and_only_time_lifts_it(code: str) -> None:
    table, _ = serving(FIRST, SECOND)
    assert table.note_lost(SECOND, code, "it says so", NOW, is_engines_word=False)
    assert row_of(table, SECOND).state == "unreachable"
    assert lose(table, FIRST, code)
    row = row_of(table)
    assert (row.state, row.reason) == ("quarantined", f"{code}: no reply")
    assert not lose(table, FIRST)
    assert not table.note_gone(FIRST, "it is dead")
    table.note_ready(FIRST, 1)
    table.note_refused(FIRST, "no_memory", "too large")
    table.clear()
    table.follow(plan(FIRST, SECOND, revision=9), BACKBONE, NOW)
    table.note_ready(FIRST, 1)
    assert (row_of(table).state, row_of(table).reason) == ("quarantined", f"{code}: no reply")
    assert [row.node_id for row in table.due(NOW)] == []
    table.follow(plan(FIRST, SECOND, revision=10), BACKBONE, after(NOW, QUARANTINE_FIRST))
    table.note_ready(FIRST, 1)
    assert (row_of(table).state, table.fault_of(FIRST)) == ("loading", None)
    assert [row.node_id for row in table.due(NOW)] == [FIRST]


def test_what_was_wrong_with_a_holder_that_is_not_in_the_plan_any_more_counts_once() -> None:
    """It leaves, and only then it is found that it does not stand for what it answered."""
    table, _ = serving(FIRST, SECOND)
    table.note_gone(FIRST, "it has said that it holds nothing")
    table.follow(plan(SECOND, revision=9), BACKBONE, NOW)
    assert table.get(FIRST) is None
    assert not lose(table, FIRST, "late")
    assert [lose(table, FIRST, "unaccountable") for _ in range(3)] == [True, False, False]
    fault = table.fault_of(FIRST)
    assert fault is not None
    assert (fault.n_faults, fault.until) == (1, after(NOW, QUARANTINE_FIRST))
    table.follow(plan(FIRST, SECOND, revision=10), BACKBONE, NOW)
    assert row_of(table).state == "quarantined"


def test_each_further_fault_doubles_the_quarantine_up_to_a_day() -> None:
    table, now, lasted = HolderConnections(), NOW, []
    for _ in range(10):
        table.clear()
        table.follow(plan(FIRST), BACKBONE, now)
        assert lose(table, FIRST, "malformed", now)
        fault = table.fault_of(FIRST)
        assert fault is not None
        lasted.append(between(now, fault.until))
        now = fault.until
    doubled = [QUARANTINE_FIRST << number for number in range(10)]
    assert lasted == [min(each, QUARANTINE_MAX) for each in doubled]
    assert lasted[-1] == QUARANTINE_MAX


def test_the_memory_of_faulty_nodes_is_bounded() -> None:
    table = HolderConnections()
    for number in range(FAULTY_MAX + 2):
        node_id = node_id_of(number.to_bytes(32, "big"))
        table.follow(plan(node_id), THIRD, NOW)
        assert lose(table, node_id, "malformed")
        table.clear()
    states = []
    for number in (0, 1, 2, FAULTY_MAX + 1):
        node_id = node_id_of(number.to_bytes(32, "big"))
        table.follow(plan(node_id), THIRD, NOW)
        states.append(row_of(table, node_id).state)
    assert states == ["loading", "loading", "quarantined", "quarantined"]


def test_who_is_gone_is_believed_at_once_when_it_is_back() -> None:
    table, _ = serving(FIRST)
    lose(table, FIRST)
    assert table.note_gone(FIRST, "it is dead")
    assert (row_of(table).state, row_of(table).connected) == ("unreachable", None)
    table.note_ready(FIRST, 1)
    assert table.due(NOW) == [row_of(table)]
    assert not table.note_gone(THIRD, "it is dead"), "it is no holder"


def test_what_happens_during_an_attempt_makes_it_pointless() -> None:
    for happen in (
        lambda table: lose(table, FIRST),
        lambda table: table.note_gone(FIRST, "it is dead"),
        lambda table: table.disconnect_all("the engine has ended"),
        lambda table: table.clear(),
    ):
        table = HolderConnections()
        table.follow(plan(FIRST), BACKBONE, NOW)
        table.note_ready(FIRST, 1)
        row = row_of(table)
        attempt = table.begin(row, NOW)
        assert table.is_current(row, attempt)
        assert table.due(NOW) == []
        happen(table)
        assert not table.is_current(row, attempt)


def test_an_attempt_that_was_broken_off_can_be_made_again() -> None:
    table = HolderConnections()
    table.follow(plan(FIRST), BACKBONE, NOW)
    table.note_ready(FIRST, 1)
    row = row_of(table)
    first = table.begin(row, NOW)
    table.end(row, first)
    assert table.due(NOW) == [row]
    second = table.begin(row, NOW)
    table.end(row, first)
    assert row.is_connecting, "the end of another attempt is not its end"
    table.end(row, second)
    assert not row.is_connecting


def test_after_the_engine_everybody_who_was_ready_still_is() -> None:
    table, _ = serving(FIRST, SECOND)
    lose(table, SECOND)
    table.disconnect_all("the engine has ended")
    assert [row.node_id for row in table.due(NOW)] == [FIRST]
    assert (row_of(table).state, row_of(table).reason) == ("loading", "the engine has ended")
    assert row_of(table, SECOND).state == "unreachable"


def test_only_a_record_that_takes_an_earlier_one_back_says_that_a_shard_is_lost() -> None:
    table, _ = serving(FIRST)
    assert not table.note_record(FIRST, holds=False), "made before it had loaded"
    assert not table.note_record(FIRST, holds=True)
    assert not table.note_record(FIRST, holds=True)
    assert table.note_record(FIRST, holds=False)
    table.note_gone(FIRST, "it has lost its shard")
    assert not table.note_record(FIRST, holds=False), "known already"
    table.note_ready(FIRST, 1)
    connect(table, FIRST)
    assert not table.note_record(FIRST, holds=False)
    connect(table, FIRST, has_shown_shard=True)
    assert table.note_record(FIRST, holds=False)
    assert not table.note_record(THIRD, holds=False)


def test_a_refusal_is_shown_unless_what_it_served_before_is_served_still() -> None:
    table, _ = serving(FIRST)
    table.follow(plan(FIRST, SECOND, revision=2), BACKBONE, NOW)
    table.note_refused(FIRST, "no_memory", "it is too large")
    table.note_refused(SECOND, "no_memory", "it is too large")
    table.note_refused(THIRD, "no_memory", "it is too large")
    assert row_of(table, FIRST).state == "serving"
    second = row_of(table, SECOND)
    assert (second.state, second.reason) == ("refused", "no_memory: it is too large")
    table.note_ready(SECOND, 1)
    assert second.state == "loading"
