"""Which rows are looked at when more wait than there is time for."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.backbone.waiting_rows import WaitingRows
from kvasir_proto.ids import node_id_of

ONE, OTHER = (node_id_of(bytes([number]) * 32) for number in (1, 2))


def test_nodes_take_turns_and_the_newest_row_of_each_is_first() -> None:
    rows: WaitingRows[str] = WaitingRows(10)
    for number in range(3):
        assert not rows.put(ONE, f"one {number}")
    rows.put(OTHER, "other 0")
    assert [rows.get() for _ in range(4)] == ["one 2", "other 0", "one 1", "one 0"]
    assert len(rows) == 0


def test_who_has_most_rows_waiting_loses_the_oldest() -> None:
    rows: WaitingRows[int] = WaitingRows(3)
    rows.put(OTHER, 100)
    assert [rows.put(ONE, number) for number in range(5)] == [False, False, True, True, True]
    assert len(rows) == 3
    assert [rows.get() for _ in range(3)] == [100, 4, 3]


def test_who_waits_for_a_row_is_told_that_there_will_be_none() -> None:
    rows: WaitingRows[int] = WaitingRows(3)
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(rows.get()))
    thread.start()
    rows.close()
    thread.join(10.0)
    assert found == [None]
    assert rows.put(ONE, 1), "it is dropped"
    assert rows.get() is None


@given(st.lists(st.tuples(st.sampled_from([None, ONE, OTHER]), st.integers()), max_size=60))
def test_every_row_is_got_or_dropped_once(steps: list[tuple[str | None, int]]) -> None:
    rows: WaitingRows[int] = WaitingRows(4)
    n_put = n_got = n_dropped = 0
    for node_id, row in steps:
        if node_id is None:
            n_got += bool(len(rows)) and rows.get() is not None
        else:
            n_put += 1
            n_dropped += rows.put(node_id, row)  # type: ignore[arg-type]
        assert len(rows) == n_put - n_got - n_dropped <= 4
