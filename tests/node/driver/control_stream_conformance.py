"""What any `ports.ControlStream` must do, as one function: run on the twin in memory and on libp2p's.

``open_pair`` gives the two ends of a fresh stream. Times are short where something must run out and long
where something must not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import pytest
import trio

from kvasir_node.ports import ControlStream
from kvasir_proto.errors import TransportUnavailable

Pair: TypeAlias = tuple[ControlStream, ControlStream]
OpenPair: TypeAlias = Callable[[], Awaitable[Pair]]

PATIENCE_S = 20.0
SHORT_S = 0.05


async def check_control_stream(open_pair: OpenPair) -> None:
    """Raise an assertion for the first guarantee that does not hold."""
    with trio.fail_after(10 * PATIENCE_S):
        await _whole_in_order_both_ways(open_pair)
        await _silence_runs_out_and_the_stream_goes_on(open_pair)
        await _cancelled_receive_loses_nothing(open_pair)
        await _what_was_sent_before_the_end_arrives(open_pair)
        await _the_end_wakes_who_waits(open_pair)
        await _nothing_after_ones_own_close(open_pair)
        await _a_slow_reader_slows_the_sender_and_gets_everything(open_pair)


async def _whole_in_order_both_ways(open_pair: OpenPair) -> None:
    near, far = await open_pair()
    bodies = [b"first", b"", b"\x00" * 70_000, b"last"]
    for body in bodies:
        await near.send(body)
    for body in bodies:
        assert await far.receive(PATIENCE_S) == body
        await far.send(body[::-1])
    assert [await near.receive(PATIENCE_S) for _ in bodies] == [body[::-1] for body in bodies]
    await near.close()


async def _silence_runs_out_and_the_stream_goes_on(open_pair: OpenPair) -> None:
    near, far = await open_pair()
    with pytest.raises(TransportUnavailable):
        await far.receive(SHORT_S)
    await near.send(b"late")
    assert await far.receive(PATIENCE_S) == b"late"
    await near.close()


async def _cancelled_receive_loses_nothing(open_pair: OpenPair) -> None:
    near, far = await open_pair()
    for number in range(20):
        with trio.CancelScope() as scope:
            scope.cancel()
            await far.receive(PATIENCE_S)
        assert scope.cancelled_caught
        await near.send(bytes([number]))
        assert await far.receive(PATIENCE_S) == bytes([number])
    await near.close()


async def _what_was_sent_before_the_end_arrives(open_pair: OpenPair) -> None:
    near, far = await open_pair()
    for number in range(5):
        await near.send(bytes([number]))
    await near.close()
    assert [await far.receive(PATIENCE_S) for _ in range(5)] == [bytes([each]) for each in range(5)]
    for _ in range(2):
        with pytest.raises(TransportUnavailable):
            await far.receive(PATIENCE_S)
    await far.close()


async def _the_end_wakes_who_waits(open_pair: OpenPair) -> None:
    near, far = await open_pair()
    woken = trio.Event()

    async def wait() -> None:
        with pytest.raises(TransportUnavailable):
            await far.receive(10 * PATIENCE_S)
        woken.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await near.close()
        with trio.fail_after(PATIENCE_S):
            await woken.wait()


async def _nothing_after_ones_own_close(open_pair: OpenPair) -> None:
    near, _far = await open_pair()
    await near.close()
    await near.close()
    with pytest.raises(TransportUnavailable):
        await near.send(b"x")
    with pytest.raises(TransportUnavailable):
        await near.receive(PATIENCE_S)


async def _a_slow_reader_slows_the_sender_and_gets_everything(open_pair: OpenPair) -> None:
    near, far = await open_pair()
    n_sent = 0
    count = 400
    body = bytes(60_000)

    async def send() -> None:
        nonlocal n_sent
        for number in range(count):
            await near.send(number.to_bytes(2, "big") + body)
            n_sent += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        first = await far.receive(PATIENCE_S)
        assert first[:2] == b"\x00\x00"
        assert n_sent < count
        for number in range(1, count):
            assert (await far.receive(PATIENCE_S))[:2] == number.to_bytes(2, "big")
    await near.close()
