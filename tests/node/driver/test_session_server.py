"""The backbone's side of sessions: who is let in, how many, and what ends one that nobody reads."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.driver.session_link import SessionLink
from kvasir_node.driver.session_server import (
    GATEWAY_SILENCE_S,
    READY_PATIENCE_S,
    SESSIONS_PER_NODE_MAX,
    STILL_HERE_S,
    SessionServer,
)
from kvasir_proto.errors import NotReady, RemoteProtocolError, TransportUnavailable
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import seconds
from kvasir_proto.limits import TOP_TOKENS_MAX
from kvasir_proto.messages.session import (
    TERM_OVER,
    OpenSession,
    SessionBroken,
    SessionMessage,
    SessionPlaced,
    SessionRefused,
    SessionToken,
    StillHere,
)
from kvasir_proto.sampling import SamplingOptions
from tests.node.driver.memory_core import MemoryCore
from tests.node.driver.memory_network import SEND_TIMEOUT_S, stream_pair
from tests.node.driver.test_completions import ScriptedRunner, ended
from tests.node.driver.twins import node_key, node_of, until
from tests.proto.small_swarm import capability, found

BACKBONE, GATEWAY, STRANGER = (node_of(node_key(number)) for number in range(3))
OPEN = OpenSession(0, 1, "somebody", (1, 2, 3, 7), 1, SamplingOptions(), 4, (9,), 2, 5000)


@dataclass
class Serving:
    """A server, and gateways' ends of streams to it."""

    nursery: trio.Nursery
    runner: ScriptedRunner
    server: SessionServer
    errors: list[Exception] = field(default_factory=list)
    n_served: int = 0

    async def ask(self, asked: SessionMessage = OPEN, node_id: NodeId = GATEWAY) -> SessionLink:
        near, far = stream_pair(node_id, BACKBONE)

        async def serve() -> None:
            try:
                await self.server.serve_stream(node_id, far)
            except (RemoteProtocolError, TransportUnavailable) as error:
                self.errors.append(error)
            self.n_served += 1
            await far.close()

        self.nursery.start_soon(serve)
        link = SessionLink(near)
        await link.send(asked)
        return link


@contextlib.asynccontextmanager
async def serving(runner: ScriptedRunner) -> AsyncIterator[Serving]:
    core = MemoryCore(BACKBONE, found(node_key(0)))
    core.records[GATEWAY] = capability(GATEWAY)
    async with trio.open_nursery() as nursery:
        yield Serving(nursery, runner, SessionServer(node_id=BACKBONE, core=core, runner=runner))
        nursery.cancel_scope.cancel()


async def all_of(link: SessionLink) -> list[SessionMessage]:
    """Everything until the end but words that somebody is there."""
    heard: list[SessionMessage] = []
    with contextlib.suppress(TransportUnavailable):
        while True:
            message = await link.receive(1000.0)
            if not isinstance(message, StillHere):
                heard.append(message)
    return heard


async def test_a_member_gets_a_place_tokens_and_the_last_one(autojump_clock: MockClock) -> None:
    end = ended("end_of_text", end_token=9, end_log_probability=-0.25, end_top=((9, -0.25),))
    async with serving(ScriptedRunner(2, end)) as world:
        heard = await all_of(await world.ask())
        top = ((20, -0.5), (7, -2.0))
        assert heard[:2] == [SessionPlaced(), SessionToken(3, 0, 1, 20, -0.5, top, None)]
        assert heard[2].position == 4  # type: ignore[union-attr]
        assert heard[3] == SessionToken(5, 0, 1, 9, -0.25, ((9, -0.25),), "stop")
        (wanted,) = world.runner.wanted
        assert (wanted.token_ids, wanted.n_emitted, wanted.n_tokens) == ((1, 2, 3, 7), 1, 4)
        assert (wanted.end_tokens, wanted.n_top, wanted.deadline_ms) == ((9,), 2, 5000)
        assert not world.errors


@pytest.mark.parametrize(
    "node_id, asked, reason",
    [
        (STRANGER, OPEN, "is no member of this swarm"),
        (GATEWAY, replace(OPEN, term=2), "is not the backbone of"),
        (GATEWAY, replace(OPEN, epoch=1), "is not the backbone of"),
        (GATEWAY, replace(OPEN, term=0), "is not the backbone of"),
    ],
)
async def test_who_may_not_have_one_is_told_why_and_nothing_is_begun(
    node_id: NodeId, asked: OpenSession, reason: str, autojump_clock: MockClock
) -> None:
    async with serving(ScriptedRunner(1, None)) as world:
        (refused,) = await all_of(await world.ask(asked, node_id))
        assert isinstance(refused, SessionRefused)
        assert refused.refusal == "not_ready"
        assert reason in refused.reason
        assert not world.runner.wanted


async def test_a_node_that_is_no_backbone_serves_nobody(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(1, None)
    runner.reign_version = None
    async with serving(runner) as world:
        (refused,) = await all_of(await world.ask())
        assert isinstance(refused, SessionRefused)


async def test_a_backbone_that_is_not_ready_yet_is_waited_for_and_a_while_only(
    autojump_clock: MockClock,
) -> None:
    runner = ScriptedRunner(0, NotReady("3 of 8 experts have a holder"))
    for ready_after_s, waited_s in ((3.0, 3.0), (1000.0, READY_PATIENCE_S)):
        runner.ready_after_s = ready_after_s
        async with serving(runner) as world:
            began = trio.current_time()
            link = await world.ask()
            assert await link.receive(STILL_HERE_S + 0.1) == StillHere()
            (refused,) = await all_of(link)
            assert refused == SessionRefused("not_ready", "3 of 8 experts have a holder", seconds(1))
            assert trio.current_time() - began == pytest.approx(waited_s)


async def test_what_opens_no_session_is_not_answered(autojump_clock: MockClock) -> None:
    async with serving(ScriptedRunner(1, None)) as world:
        assert await all_of(await world.ask(StillHere())) == []
        link = await world.ask()
        await link.send(OPEN)
        assert isinstance((await all_of(link))[0], SessionPlaced)
        assert [type(each) for each in world.errors] == [RemoteProtocolError] * 2
        assert world.runner.is_cancelled


async def test_one_node_has_so_many_sessions_and_others_have_theirs(autojump_clock: MockClock) -> None:
    async with serving(ScriptedRunner(0, None)) as world:
        links = [await world.ask() for _ in range(SESSIONS_PER_NODE_MAX)]
        await trio.sleep(0.1)
        (refused,) = await all_of(await world.ask())
        assert isinstance(refused, SessionRefused)
        assert (refused.refusal, refused.retry_after_ns) == ("busy", seconds(1))
        world.server._core.records[STRANGER] = capability(STRANGER)  # type: ignore[attr-defined]
        await world.ask(node_id=STRANGER)
        await trio.sleep(0.1)
        assert len(world.runner.wanted) == SESSIONS_PER_NODE_MAX + 1
        for link in links:
            await link.close()
        await trio.sleep(0.1)
        assert world.n_served == SESSIONS_PER_NODE_MAX + 1
        await world.ask()
        await trio.sleep(0.1)
        assert len(world.runner.wanted) == SESSIONS_PER_NODE_MAX + 2, "places are given back"


async def test_a_client_is_its_nodes_own(autojump_clock: MockClock) -> None:
    async with serving(ScriptedRunner(0, None)) as world:
        world.server._core.records[STRANGER] = capability(STRANGER)  # type: ignore[attr-defined]
        for node_id, client in ((GATEWAY, "a"), (GATEWAY, "a"), (GATEWAY, "local"), (STRANGER, "a")):
            await world.ask(replace(OPEN, client=client), node_id)
            await trio.sleep(0.1)
        clients = [each.client for each in world.runner.wanted]
        assert clients[0] == clients[1]
        assert len(set(clients)) == 3
        assert "local" not in clients


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_gateway_that_goes_or_falls_silent_has_its_session_cancelled(
    is_silent: bool, autojump_clock: MockClock
) -> None:
    async with serving(ScriptedRunner(1, None)) as world:
        link = await world.ask()
        began = trio.current_time()
        if not is_silent:
            await link.close()
        while not world.n_served:
            await trio.sleep(0.1)
            if is_silent:
                with trio.move_on_after(0.01):
                    await link.receive(1.0)
        assert world.runner.is_cancelled
        assert trio.current_time() - began == pytest.approx(GATEWAY_SILENCE_S if is_silent else 0.1, abs=0.3)


async def test_a_gateway_that_says_it_is_there_is_told_the_same_and_keeps_its_session(
    autojump_clock: MockClock,
) -> None:
    async with serving(ScriptedRunner(0, None)) as world:
        link = await world.ask()
        for _ in range(30):
            await link.send(StillHere())
            for _ in range(2):
                await link.receive(STILL_HERE_S + 0.1)
        assert not world.n_served
        assert trio.current_time() > 100.0


async def test_a_gateway_that_does_not_read_holds_up_nobody_and_loses_its_session(
    autojump_clock: MockClock,
) -> None:
    """The duty's own queue of tokens has room for all; the stream's has not."""
    runner = ScriptedRunner(10_000, None)
    async with serving(runner) as world:
        link = await world.ask(replace(OPEN, n_tokens=10_000))

        async def stay() -> None:
            while True:
                await trio.sleep(5.0)
                with contextlib.suppress(TransportUnavailable):
                    await link.send(StillHere())

        world.nursery.start_soon(stay)
        began = trio.current_time()
        await until(lambda: bool(world.n_served))
        assert trio.current_time() - began < 2 * SEND_TIMEOUT_S + 10.0
        assert [type(each) for each in world.errors] == [TransportUnavailable]


@pytest.mark.parametrize(
    "end, last",
    [
        (ended("failed", "lease_expired"), SessionBroken(TERM_OVER, "a sentence", False)),
        (ended("failed", "stopped"), SessionBroken(TERM_OVER, "a sentence", False)),
        (ended("failed", "no_holder_left"), SessionBroken("no_holder_left", "a sentence", False)),
        (ended("failed", "internal"), SessionBroken("internal", "a sentence", True)),
        (ended("failed", "usage_error"), SessionRefused("too_long", "a sentence", 0)),
        (ended("failed", "queue_full", retry_after_ns=7), SessionRefused("busy", "a sentence", 7)),
    ],
)
async def test_how_a_session_ended_is_said_in_the_gateways_words(
    end: object, last: SessionMessage, autojump_clock: MockClock
) -> None:
    async with serving(ScriptedRunner(0, end)) as world:  # type: ignore[arg-type]
        assert await all_of(await world.ask()) == [last]


async def test_the_largest_token_and_the_largest_question_fit_a_frame(autojump_clock: MockClock) -> None:
    async with serving(ScriptedRunner(0, ended("length"))) as world:
        long = replace(OPEN, token_ids=tuple(range(1 << 30, (1 << 30) + (1 << 18))), n_emitted=0)
        assert await all_of(await world.ask(long)) == []
        (wanted,) = world.runner.wanted
        assert wanted.token_ids == long.token_ids
    top = tuple((token, -1.0) for token in range(TOP_TOKENS_MAX))
    near, far = stream_pair(GATEWAY, BACKBONE)
    token = SessionToken(3, 0, 1, 20, -0.5, top, None)
    await SessionLink(near).send(token)
    assert await SessionLink(far).receive(1.0) == token
