"""What any `ports.RecordStore` must do, as one function: run on the twin in memory and on libp2p's DHT.

A record here is text: node, order, and a word that must be `good`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, TypeAlias

import pytest
import trio

from kvasir_node.ports import Claim, RecordStore
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId, is_node_id
from tests.node.driver.twins import node_key, node_of

PATIENCE_S = 20.0
STRANGER = node_of(node_key(98))


class Storer(NamedTuple):
    node_id: NodeId
    records: RecordStore


MakeStorers: TypeAlias = Callable[[int], AbstractAsyncContextManager[list[Storer]]]
"""So many members that know each other and judge records by `judge`."""


def record(node_id: NodeId, order: int, word: str = "good") -> bytes:
    return f"{node_id} {order} {word}".encode()


def judge(data: bytes) -> Claim | None:
    match data.decode("utf-8", "replace").split(" ")[:3]:
        case [node_id, order, "good"] if is_node_id(node_id) and order.isdecimal():
            return Claim(NodeId(node_id), int(order))
    return None


async def check_record_store(make_storers: MakeStorers) -> None:
    """Raise an assertion for the first guarantee that does not hold."""
    with trio.fail_after(5 * PATIENCE_S):
        async with make_storers(4) as storers:
            await _what_one_stores_all_find(storers)
            await _the_newest_is_found_by_those_who_had_an_older_one(storers)
            await _an_older_one_is_refused(storers)
            await _what_is_no_record_is_refused(storers)
            assert await storers[0].records.get(STRANGER, PATIENCE_S) is None


async def _what_one_stores_all_find(storers: list[Storer]) -> None:
    for storer in storers:
        await storer.records.put(record(storer.node_id, 1))
    for asker in storers:
        for storer in storers:
            assert await asker.records.get(storer.node_id, PATIENCE_S) == record(storer.node_id, 1)


async def _the_newest_is_found_by_those_who_had_an_older_one(storers: list[Storer]) -> None:
    owner = storers[1]
    for order in (2, 5):
        await owner.records.put(record(owner.node_id, order))
        for asker in storers:
            assert await asker.records.get(owner.node_id, PATIENCE_S) == record(owner.node_id, order)


async def _an_older_one_is_refused(storers: list[Storer]) -> None:
    owner = storers[1]
    with pytest.raises(LocalProtocolError):
        await owner.records.put(record(owner.node_id, 4))
    for asker in storers:
        assert await asker.records.get(owner.node_id, PATIENCE_S) == record(owner.node_id, 5)


async def _what_is_no_record_is_refused(storers: list[Storer]) -> None:
    owner = storers[2]
    for data in (b"", record(owner.node_id, 9, "bad"), record(owner.node_id, 9) + b" " + bytes(1 << 20)):
        with pytest.raises(LocalProtocolError):
            await owner.records.put(data)
    assert await storers[0].records.get(owner.node_id, PATIENCE_S) == record(owner.node_id, 1)
