"""Which connections are let go of: those used longest ago beyond a bound, and none that is needed."""

from __future__ import annotations

from random import Random

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.net.idle_connections import ConnectionUse, IdleConnections, IdleOptions, superfluous
from kvasir_proto.ids import NodeId, node_id_of

OPTIONS = IdleOptions(kept_max=3, idle_min_s=60.0)
A, B, C, D, E, F = sorted(node_id_of(Random(number).randbytes(32)) for number in range(6))


def use(node_id: NodeId, used_at_s: float, *, is_busy: bool = False) -> ConnectionUse:
    return ConnectionUse(node_id, is_busy, used_at_s)


@pytest.mark.parametrize(
    "uses, neighbours, closed",
    [
        ([], (), ()),
        ([use(A, 0), use(B, 1), use(C, 2)], (), ()),
        ([use(A, 3), use(B, 1), use(C, 2), use(D, 4)], (), (B,)),
        ([use(A, 3), use(B, 1), use(C, 2), use(D, 4), use(E, 5)], (), (B, C)),
        ([use(A, 1), use(B, 1), use(C, 1), use(D, 1)], (), (A,)),
        ([use(A, 1, is_busy=True), use(B, 2), use(C, 3), use(D, 4)], (), (B,)),
        ([use(A, 1), use(B, 2), use(C, 3), use(D, 4)], (A,), (B,)),
        ([use(A, 1), use(B, 41), use(C, 41), use(D, 41), use(E, 41)], (), (A,)),
        ([use(each, 1, is_busy=True) for each in (A, B, C, D, E, F)], (), ()),
        ([use(each, 1) for each in (A, B, C, D)], (A, B, C, D, E), ()),
        ([*(use(each, 1, is_busy=True) for each in (A, B, C, D)), use(E, 2), use(F, 3)], (), (E, F)),
    ],
    ids=[
        "nobody",
        "as many as are kept",
        "the one used longest ago",
        "two",
        "by name where used at once",
        "not one in use",
        "not a neighbour in gossip's mesh",
        "not one used within the minute",
        "all in use",
        "all neighbours",
        "those in use count",
    ],
)
def test_what_is_superfluous(
    uses: list[ConnectionUse], neighbours: tuple[NodeId, ...], closed: tuple[NodeId, ...]
) -> None:
    assert superfluous(uses, neighbours, 100.0, OPTIONS) == closed
    assert superfluous(reversed(uses), neighbours, 100.0, OPTIONS) == closed


class TwinHost:
    """Connections that a test opens; closing takes a moment, as it does on a network."""

    def __init__(self) -> None:
        self.uses: dict[NodeId, ConnectionUse] = {}
        self.closed: list[NodeId] = []

    def connection_uses(self) -> tuple[ConnectionUse, ...]:
        return tuple(self.uses.values())

    async def disconnect(self, node_id: NodeId) -> None:
        self.closed.append(node_id)
        await trio.sleep(1.0)
        del self.uses[node_id]


async def test_it_looks_now_and_then_and_spares_who_came_into_use_meanwhile(
    autojump_clock: MockClock,
) -> None:
    host = TwinHost()
    started = trio.current_time()
    host.uses = {each: use(each, started) for each in (A, B, C, D, E, F)}
    async with trio.open_nursery() as nursery:
        await nursery.start(IdleConnections(host, lambda: {A}, OPTIONS).run)
        await trio.sleep(55)
        assert host.closed == []
        await trio.sleep(6.5)
        assert host.closed == [B, C]
        host.uses[D] = use(D, started, is_busy=True)
        await trio.sleep(1)
        assert host.closed == [B, C], "it was the next one"
        await trio.sleep(10)
        assert host.closed == [B, C, E]
        await trio.sleep(60)
        assert sorted(host.uses) == [A, D, F], "as many as are kept"
        nursery.cancel_scope.cancel()
