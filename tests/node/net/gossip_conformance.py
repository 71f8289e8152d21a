"""What any `ports.Gossip` must do, as one function: run on the twin in memory and on libp2p's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, TypeAlias

import pytest
import trio

from kvasir_node.ports import Accept, Gossip, GossipTopic
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId

PATIENCE_S = 20.0
QUIET_S = 0.3


class Gossiper(NamedTuple):
    node_id: NodeId
    gossip: Gossip


MakeMembers: TypeAlias = Callable[[int], AbstractAsyncContextManager[list[Gossiper]]]
"""So many members that hear of each other; all accept what `is_good` says."""


def is_good(data: bytes) -> bool:
    return data.startswith(b"good")


ACCEPT: dict[GossipTopic, Accept] = {"records": is_good, "terms": is_good}


async def check_gossip(make_members: MakeMembers) -> None:
    """Raise an assertion for the first guarantee that does not hold."""
    with trio.fail_after(5 * PATIENCE_S):
        async with make_members(4) as members:
            await _everybody_else_hears_once(members)
            await _equal_data_is_one_message(members)
            await _topics_are_apart(members)
            await _what_is_no_message_is_refused(members)


async def heard(member: Gossiper, count: int) -> list[bytes]:
    """The next messages; fewer when no more come for a while."""
    found: list[bytes] = []
    with trio.move_on_after(PATIENCE_S):
        while len(found) < count:
            message = await member.gossip.receive()
            assert message.forwarder != member.node_id
            found.append(message.data)
    with trio.move_on_after(QUIET_S):
        while True:
            found.append((await member.gossip.receive()).data)
    return sorted(found)


async def all_hear(members: list[Gossiper], data: list[bytes]) -> None:
    async with trio.open_nursery() as nursery:
        for member in members:

            async def check(member: Gossiper = member) -> None:
                assert await heard(member, len(data)) == sorted(data)

            nursery.start_soon(check)


async def _everybody_else_hears_once(members: list[Gossiper]) -> None:
    data = [b"good %d" % number for number in range(10)]
    for each in data:
        assert members[0].gossip.publish("records", each)
    await all_hear(members[1:], data)
    await all_hear(members[:1], [])


async def _equal_data_is_one_message(members: list[Gossiper]) -> None:
    for _ in range(2):
        members[1].gossip.publish("records", b"good, twice")
        members[2].gossip.publish("records", b"good, twice")
        await trio.sleep(QUIET_S)
    await all_hear(members[3:], [b"good, twice"])
    await all_hear(members[:1], [b"good, twice"])
    for member in members[1:3]:
        assert len(await heard(member, 0)) <= 1


async def _topics_are_apart(members: list[Gossiper]) -> None:
    members[0].gossip.publish("records", b"good on both")
    members[0].gossip.publish("terms", b"good on both")
    for member in members[1:]:
        with trio.fail_after(PATIENCE_S):
            found = [await member.gossip.receive() for _ in range(2)]
        assert sorted(each.topic for each in found) == ["records", "terms"]


async def _what_is_no_message_is_refused(members: list[Gossiper]) -> None:
    for data in (b"", b"bad", b"good" + bytes(1 << 20)):
        with pytest.raises(LocalProtocolError):
            members[0].gossip.publish("terms", data)
