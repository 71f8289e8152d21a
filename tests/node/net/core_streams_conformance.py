"""What any `ports.CoreStreams` must do, as one function: run on hosts in memory and on libp2p's.

``make_pair`` is a fresh pair of members that know each other's addresses and have said nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, TypeAlias

import pytest
import trio

from kvasir_node.ports import ConnectionLost, CoreMessage, CoreStreams
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.limits import SWARM_FRAME_SIZE_MAX
from tests.node.driver.twins import node_key, node_of

PATIENCE_S = 20.0
NOBODY = node_of(node_key(99))


class Member(NamedTuple):
    node_id: NodeId
    streams: CoreStreams


MakePair: TypeAlias = Callable[[], AbstractAsyncContextManager[tuple[Member, Member]]]


async def check_core_streams(make_pair: MakePair) -> None:
    """Raise an assertion for the first guarantee that does not hold."""
    with trio.fail_after(10 * PATIENCE_S):
        async with make_pair() as (first, second):
            await _whole_and_in_order_both_ways(first, second)
        async with make_pair() as (first, second):
            await _both_may_begin_at_once(first, second)
        async with make_pair() as (first, second):
            await _sending_never_waits_and_the_newest_survives(first, second)
        async with make_pair() as (first, second):
            await _what_is_no_message_is_refused(first, second)
        async with make_pair() as (first, second):
            await _a_node_nobody_knows_is_reported_and_others_are_served(first, second)


async def hears(member: Member, sender: NodeId, body: bytes) -> None:
    event = await member.streams.receive()
    assert event == CoreMessage(sender, body), event


async def _whole_and_in_order_both_ways(first: Member, second: Member) -> None:
    bodies = [b"x", b"y" * 70_000, bytes(SWARM_FRAME_SIZE_MAX), b"last"]
    for body in bodies:
        assert first.streams.send(second.node_id, body)
    for body in bodies:
        await hears(second, first.node_id, body)
        assert second.streams.send(first.node_id, body[::-1])
    for body in bodies:
        await hears(first, second.node_id, body[::-1])


async def _both_may_begin_at_once(first: Member, second: Member) -> None:
    for number in range(20):
        assert first.streams.send(second.node_id, bytes([1, number]))
        assert second.streams.send(first.node_id, bytes([2, number]))
        if number % 5 == 0:
            await trio.sleep(0.01)
    for number in range(20):
        await hears(second, first.node_id, bytes([1, number]))
        await hears(first, second.node_id, bytes([2, number]))


async def _sending_never_waits_and_the_newest_survives(first: Member, second: Member) -> None:
    count = 1000
    whole = [first.streams.send(second.node_id, number.to_bytes(2, "big")) for number in range(count)]
    assert whole[0]
    assert not whole[-1]
    numbers: list[int] = []
    while not numbers or numbers[-1] != count - 1:
        event = await second.streams.receive()
        assert isinstance(event, CoreMessage)
        numbers.append(int.from_bytes(event.body, "big"))
    assert numbers == sorted(set(numbers))
    assert len(numbers) < count


async def _what_is_no_message_is_refused(first: Member, second: Member) -> None:
    for body in (b"", bytes(SWARM_FRAME_SIZE_MAX + 1)):
        with pytest.raises(LocalProtocolError):
            first.streams.send(second.node_id, body)
    first.streams.send(second.node_id, b"good")
    await hears(second, first.node_id, b"good")


async def _a_node_nobody_knows_is_reported_and_others_are_served(first: Member, second: Member) -> None:
    first.streams.send(NOBODY, b"anybody?")
    first.streams.send(second.node_id, b"you")
    event = await first.streams.receive()
    assert isinstance(event, ConnectionLost)
    assert event.node_id == NOBODY
    await hears(second, first.node_id, b"you")
