"""Who is planned without, and until when: a table with a bound."""

from __future__ import annotations

from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Instant
from kvasir_proto.quarantine import QUARANTINED_MAX, Quarantined, QuarantineTable

FIRST, SECOND = (node_id_of(bytes([number]) * 32) for number in (1, 2))


def quarantined(node_id: NodeId, until: int, reason: str = "non_finite") -> Quarantined:
    return Quarantined(node_id, Instant(until), reason)


def test_each_stays_until_its_time_is_over() -> None:
    table = QuarantineTable()
    assert (table.next_end(), table.let_go(Instant(0))) == (None, False)
    table.add(quarantined(SECOND, 20))
    table.add(quarantined(FIRST, 10))
    assert table.rows() == tuple(sorted((quarantined(FIRST, 10), quarantined(SECOND, 20))))
    assert table.next_end() == 10
    assert not table.let_go(Instant(9))
    assert table.let_go(Instant(10))
    assert FIRST not in table
    assert SECOND in table
    assert table.next_end() == 20


def test_a_second_fault_never_shortens_it() -> None:
    table = QuarantineTable()
    table.add(quarantined(FIRST, 20, "malformed"))
    table.add(quarantined(FIRST, 10))
    assert table.rows() == (quarantined(FIRST, 20, "malformed"),)
    table.add(quarantined(FIRST, 30))
    assert table.rows() == (quarantined(FIRST, 30),)


def test_the_table_is_bounded_and_whose_time_is_over_soonest_goes() -> None:
    table = QuarantineTable()
    nodes = [node_id_of(number.to_bytes(32, "big")) for number in range(QUARANTINED_MAX + 2)]
    for number, node_id in enumerate(nodes):
        table.add(quarantined(node_id, 10_000 + number))
    assert {each.node_id for each in table.rows()} == set(nodes[2:])
