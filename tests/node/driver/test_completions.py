"""The gateway's port over a backbone that is told what to do: every session ends in one way, in time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.driver.completions import SwarmCompletions
from kvasir_node.driver.session_link import SessionLink
from kvasir_node.driver.session_server import SessionServer
from kvasir_node.gateway.ports import CompletionRefused, GeneratedToken, TokenRequest
from kvasir_node.ports import ControlStream
from kvasir_proto.continuation import ContinuationOptions
from kvasir_proto.election.requests import TermFollowed, TermVoided
from kvasir_proto.errors import Busy, EngineFailed, LocalProtocolError, NotReady, TransportUnavailable
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import in_seconds
from kvasir_proto.limits import EndReason
from kvasir_proto.messages.engine import Generate, SessionEnded, TokenEmitted
from kvasir_proto.sampling import Sampling, SamplingOptions
from kvasir_proto.term_proof import ProvenTerm
from tests.node.driver.memory_core import MemoryCore
from tests.node.driver.memory_network import stream_pair
from tests.node.driver.twins import node_key, node_of, now
from tests.proto.small_swarm import capability, found

GREEDY = SamplingOptions(Sampling(temperature=0.0), presence_penalty=0.5)
REQUEST = TokenRequest("somebody", (1, 2, 3), GREEDY, 4, (9,), 2)
HERE, THERE = node_of(node_key(0)), node_of(node_key(1))
TERM = ProvenTerm(0, 1, HERE)
OPEN_PATIENCE_S = in_seconds(ContinuationOptions().open_patience)
Emit = Callable[[TokenEmitted], Awaitable[None]]


class ScriptedRunner:
    """Opens after so long, emits tokens a second apart, then ends or raises."""

    def __init__(
        self, n_tokens: int, end: SessionEnded | Exception | None, opens_after_s: float = 0.0
    ) -> None:
        self.n_tokens, self.end, self.opens_after_s = n_tokens, end, opens_after_s
        self.wanted: list[Generate] = []
        self.is_cancelled = False
        self.reign_version: tuple[int, int] | None = (0, 1)
        self.ready_after_s = 0.0

    async def wait_ready(self, version: tuple[int, int]) -> None:
        assert version == self.reign_version
        if self.ready_after_s:
            await trio.sleep(self.ready_after_s)

    async def run_session(
        self, wanted: Generate, emit: Emit, note_opened: Callable[[], None]
    ) -> SessionEnded:
        self.wanted.append(wanted)
        try:
            await trio.sleep(self.opens_after_s)
            if self.n_tokens or self.end is None:
                note_opened()
            for index in range(self.n_tokens):
                await trio.sleep(1.0)
                is_last = isinstance(self.end, SessionEnded) and self.end.reason == "length"
                await emit(
                    TokenEmitted(
                        wanted.session,
                        3 + index,
                        20 + index,
                        b"",
                        0,
                        1,
                        -0.5,
                        ((20 + index, -0.5), (7, -2.0))[: wanted.n_top or 0],
                        is_last and index + 1 == self.n_tokens,
                    )
                )
            if self.end is None:
                await trio.sleep_forever()
            if isinstance(self.end, Exception):
                raise self.end
            assert self.end is not None
            return self.end
        except trio.Cancelled:
            self.is_cancelled = True
            raise


def ended(reason: EndReason, code: str = "", **more: Any) -> SessionEnded:
    return SessionEnded(bytes(16), reason, code, "a sentence", 3, 0, 0, 0, 0, 0, **more)  # type: ignore[arg-type]


async def never(_node_id: NodeId) -> ControlStream:
    await trio.lowlevel.checkpoint()
    raise TransportUnavailable("nobody is there")


def completions(runner: ScriptedRunner, term: ProvenTerm | None = TERM) -> SwarmCompletions:
    """Of a node that is the backbone itself."""
    server = SessionServer(node_id=HERE, core=MemoryCore(HERE, found(node_key(0))), runner=runner)
    return SwarmCompletions(node_id=HERE, term=term, open_stream=never, serve=server.serve, now=now)


async def collect(runner: ScriptedRunner, got: list[GeneratedToken] | None = None) -> list[GeneratedToken]:
    got = [] if got is None else got
    async with completions(runner).open(REQUEST) as tokens:
        async for each in tokens:
            got.append(each)
    return got


async def test_a_request_is_handed_over_whole(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(2, ended("length"))
    await collect(runner)
    (wanted,) = runner.wanted
    assert (wanted.prompt, wanted.token_ids, wanted.sampling) == (None, (1, 2, 3), GREEDY)
    assert (wanted.n_emitted, wanted.deadline_ms) == (0, 3_600_000)
    assert (wanted.n_tokens, wanted.end_tokens, wanted.n_top) == (4, (9,), 2)


async def test_the_last_token_says_why_it_is_the_last(autojump_clock: MockClock) -> None:
    got = await collect(ScriptedRunner(2, ended("length")))
    assert got[0] == GeneratedToken(20, -0.5, ((20, -0.5), (7, -2.0)), None)
    assert [(each.token_id, each.finish) for each in got] == [(20, None), (21, "length")]
    end = ended("end_of_text", end_token=9, end_log_probability=-0.25, end_top=((9, -0.25),))
    got = await collect(ScriptedRunner(2, end))
    assert [(each.token_id, each.finish) for each in got] == [(20, None), (21, None), (9, "stop")]
    assert got[-1].top == ((9, -0.25),)
    assert [each.finish for each in await collect(ScriptedRunner(0, end))] == ["stop"]


@pytest.mark.parametrize(
    "end, kind, retry_after_s",
    [
        (ended("failed", "queue_full", retry_after_ns=7_000_000_000), "busy", 7.0),
        (ended("failed", "busy"), "busy", 1.0),
        (ended("failed", "usage_error"), "too_long", 0.0),
        (Busy("72 sessions"), "busy", 1.0),
        (NotReady("not the backbone"), "not_ready", 1.0),
        (LocalProtocolError("n_tokens is out of bounds"), "too_long", 1.0),
    ],
)
async def test_what_is_not_begun_is_refused_while_it_is_opened(
    end: SessionEnded | Exception, kind: str, retry_after_s: float, autojump_clock: MockClock
) -> None:
    with pytest.raises(CompletionRefused) as raised:
        async with completions(ScriptedRunner(0, end)).open(REQUEST):
            raise AssertionError("it was opened")
    assert (raised.value.kind, raised.value.retry_after_s) == (kind, retry_after_s)


async def test_a_request_that_no_message_can_carry_is_refused(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(1, None)
    with pytest.raises(CompletionRefused, match="n_tokens") as raised:
        async with completions(runner).open(TokenRequest("x", (1,), GREEDY, 1 << 30, ())):
            raise AssertionError("it was opened")
    assert raised.value.kind == "too_long"
    assert not runner.wanted


@pytest.mark.parametrize("term", [None, ProvenTerm(0, 1, HERE), ProvenTerm(0, 1, THERE)])
async def test_where_no_backbone_gives_it_a_place_a_client_is_refused_in_time(
    term: ProvenTerm | None, autojump_clock: MockClock
) -> None:
    """None is known, its engine says nothing, or it cannot be reached."""
    runner = ScriptedRunner(1, None, opens_after_s=1000.0)
    began = trio.current_time()
    with pytest.raises(CompletionRefused) as raised:
        async with completions(runner, term).open(REQUEST):
            raise AssertionError("it was opened")
    assert raised.value.kind == "not_ready"
    assert trio.current_time() - began == pytest.approx(OPEN_PATIENCE_S)
    assert runner.is_cancelled == bool(runner.wanted)


async def test_a_backbone_that_is_proven_while_a_client_waits_is_asked_at_once(
    autojump_clock: MockClock,
) -> None:
    runner = ScriptedRunner(0, ended("end_of_text", end_token=9))
    made = completions(runner, None)
    got: list[GeneratedToken] = []

    async def read() -> None:
        async with made.open(REQUEST) as tokens:
            got.extend([each async for each in tokens])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.sleep(5.0)
        made.take_event(TermFollowed(ProvenTerm(0, 1, HERE), b""))
        await trio.sleep(0.01)
        assert [each.finish for each in got] == ["stop"]


@pytest.mark.parametrize(
    "end, error",
    [
        (ended("failed", "internal"), EngineFailed),
        (ended("failed", "session_deadline_expired"), EngineFailed),
        (ended("failed", "waited_too_long", retry_after_ns=1), EngineFailed),
    ],
)
async def test_a_session_that_cannot_go_on_says_so_behind_its_tokens(
    end: SessionEnded, error: type[Exception], autojump_clock: MockClock
) -> None:
    got: list[GeneratedToken] = []
    runner = ScriptedRunner(1, end)
    with pytest.raises(error):
        await collect(runner, got)
    assert got[0].token_id == 20


@pytest.mark.parametrize(
    "end",
    [
        ended("failed", "no_holder_left"),
        ended("failed", "lease_expired"),
        EngineFailed("the engine ended"),
        NotReady("no longer the backbone"),
    ],
)
async def test_what_another_attempt_may_not_meet_is_tried_again_from_where_it_was(
    end: SessionEnded | Exception, autojump_clock: MockClock
) -> None:
    """Each attempt gives one token."""
    runner = ScriptedRunner(1, end)
    text = []

    async def run_session(wanted: Generate, emit: Emit, note_opened: Callable[[], None]) -> SessionEnded:
        runner.wanted.append(wanted)
        await emit(TokenEmitted(wanted.session, len(wanted.token_ids), 20 + len(runner.wanted), b"", 0, 1))
        if isinstance(end, Exception):
            raise end
        return end

    runner.run_session = run_session  # type: ignore[method-assign]
    text = [each.token_id for each in await collect(runner)]
    assert text == [21, 22, 23, 24]
    assert [each.n_emitted for each in runner.wanted] == [0, 1, 2, 3]
    assert [each.n_tokens for each in runner.wanted] == [4, 3, 2, 1]
    assert runner.wanted[-1].token_ids == (1, 2, 3, 21, 22, 23)


async def test_a_void_term_is_waited_out_and_patience_ends(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(1, None)
    made = completions(runner)
    async with made.open(REQUEST) as tokens:
        await anext(tokens)
        began = trio.current_time()
        made.take_event(TermVoided(0, 1))
        with pytest.raises(NotReady, match="void"):
            await anext(tokens)
    assert runner.is_cancelled
    patience_s = in_seconds(ContinuationOptions().patience)
    assert trio.current_time() - began == pytest.approx(patience_s)


async def test_a_backbone_elsewhere_is_asked_over_a_stream_that_ends_with_the_session(
    autojump_clock: MockClock,
) -> None:
    runner = ScriptedRunner(4, ended("length"))
    core = MemoryCore(THERE, found(node_key(0)))
    core.records[HERE] = capability(HERE)
    server = SessionServer(node_id=THERE, core=core, runner=runner)
    streams = []

    async with trio.open_nursery() as nursery:

        async def open_stream(node_id: NodeId) -> ControlStream:
            assert node_id == THERE
            near, far = stream_pair(HERE, THERE)
            streams.append(near)
            nursery.start_soon(server.serve_stream, HERE, far)
            await trio.lowlevel.checkpoint()
            return near

        async def serve(_node_id: NodeId, _link: SessionLink) -> None:
            raise AssertionError("this node is not the backbone")

        made = SwarmCompletions(
            node_id=HERE, term=ProvenTerm(0, 1, THERE), open_stream=open_stream, serve=serve, now=now
        )
        async with made.open(REQUEST) as tokens:
            assert [each.token_id async for each in tokens] == [20, 21, 22, 23]
        with pytest.raises(TransportUnavailable):
            await streams[0].receive(0.0)


async def test_leaving_cancels_the_session_at_once(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(1, None)
    async with completions(runner).open(REQUEST) as tokens:
        async for _ in tokens:
            break
        began = trio.current_time()
    assert runner.is_cancelled
    assert trio.current_time() == began


async def test_an_error_of_whoever_reads_comes_as_itself(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(1, None)
    with pytest.raises(ZeroDivisionError):
        async with completions(runner).open(REQUEST):
            raise ZeroDivisionError
    assert runner.is_cancelled
