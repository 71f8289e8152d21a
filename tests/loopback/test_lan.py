"""Announcements on a real, if small, LAN: the loopback interface."""

from __future__ import annotations

import pytest
import trio

from kvasir_node.net.lan import LanDiscovery
from kvasir_proto.ids import NodeId
from tests.loopback.swarm_of_hosts import OTHER_SWARM, PATIENCE_S, SWARM
from tests.node.driver.twins import node_key, node_of

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

FIRST, SECOND, FOREIGN = (node_of(node_key(each)) for each in range(3))


async def test_members_of_one_swarm_find_each_other_and_no_others() -> None:
    found: dict[NodeId, dict[NodeId, tuple[str, ...]]] = {FIRST: {}, SECOND: {}, FOREIGN: {}}
    address = "/ip4/127.0.0.1/tcp/4001"
    async with trio.open_nursery() as nursery:
        for node_id, swarm in ((FIRST, SWARM), (FOREIGN, OTHER_SWARM), (SECOND, SWARM)):
            lan = LanDiscovery(node_id, swarm, [f"{address}/p2p/{node_id}"])
            nursery.start_soon(lan.run, found[node_id].__setitem__)
        with trio.fail_after(PATIENCE_S):
            while not (found[FIRST] and found[SECOND]):  # noqa: ASYNC110 - set from another thread
                await trio.sleep(0.05)
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    assert found == {
        FIRST: {SECOND: (f"{address}/p2p/{SECOND}",)},
        SECOND: {FIRST: (f"{address}/p2p/{FIRST}",)},
        FOREIGN: {},
    }
