"""Sessions of whole nodes on a mock clock: through any node, and on when the backbone dies, stops or stalls.

A twin engine's token is its position plus ten, so whoever went on with a session knew where it was.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from trio.testing import MockClock

from kvasir_node.gateway.ports import GeneratedToken, TokenRequest
from kvasir_node.model.store import StoredModel
from kvasir_proto.messages.engine import Generate
from kvasir_proto.sampling import Sampling, SamplingOptions
from tests.node.driver.node_world import NodeWorld, TwinNode
from tests.node.driver.test_node_duty import open_nodes
from tests.node.driver.twins import TwinEngine, until

PAUSE_MAX_S = 10.0
TOKEN_S = 0.1


def request(n_tokens: int = 60, client: str = "somebody") -> TokenRequest:
    sampling = SamplingOptions(Sampling(seed=3), presence_penalty=0.5)
    return TokenRequest(client, (1, 2, 3), sampling, n_tokens, (), 0)


def text(n_tokens: int) -> list[int]:
    return [13 + index for index in range(n_tokens)]


class Reader:
    """A client that reads one session to its end, and notes how long it waited for a token at most."""

    def __init__(self, node: TwinNode, wanted: TokenRequest) -> None:
        self.node = node
        self.wanted = wanted
        self.tokens: list[GeneratedToken] = []
        self.error: BaseException | None = None
        self.pause_s = 0.0
        self.is_over = False

    async def read(self) -> None:
        try:
            async with self.node.duty.completions.open(self.wanted) as tokens:
                last = trio.current_time()
                async for each in tokens:
                    now = trio.current_time()
                    self.pause_s, last = max(self.pause_s, now - last), now
                    self.tokens.append(each)
        except Exception as error:
            self.error = error
        self.is_over = True

    @property
    def text(self) -> list[int]:
        return [each.token_id for each in self.tokens]


def slow(engine: TwinEngine) -> None:
    engine.token_s = TOKEN_S


async def start(world: NodeWorld, n_nodes: int = 4) -> tuple[TwinNode, list[TwinNode]]:
    """The backbone, and the others."""
    for node in world.start(*range(n_nodes)):
        node.engines.before_start = slow
        for engine in node.engines.all:
            slow(engine)
    await until(world.is_ready)
    await until(lambda: all(len(electors_of(each)) >= 3 for each in world.nodes))
    backbone = world.backbone
    assert backbone is not None
    return backbone, [each for each in world.nodes if each is not backbone]


async def read_all(readers: list[Reader], meanwhile: Callable[[], Awaitable[None]]) -> None:
    """Have them read to the end; ``meanwhile`` begins when each has some tokens."""
    async with trio.open_nursery() as nursery:
        for reader in readers:
            nursery.start_soon(reader.read)
        await until(lambda: all(len(each.tokens) >= 15 for each in readers))
        await meanwhile()
        await until(lambda: all(each.is_over for each in readers))
    for reader in readers:
        assert reader.error is None
        assert reader.text == text(reader.wanted.n_tokens_max)
        assert [each.finish for each in reader.tokens[:-1]] == [None] * (len(reader.tokens) - 1)


def electors_of(node: TwinNode) -> tuple[bytes, ...]:
    core = node.duty._core
    return core.view().electorate.members if core is not None else ()


def generates_of(node: TwinNode) -> list[Generate]:
    return [each for engine in node.engines.all for each in engine.received if isinstance(each, Generate)]


async def test_any_node_runs_a_session_on_whoever_is_the_backbone(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone, others = await start(world)
        readers = [Reader(each, request(20, "the same")) for each in (backbone, *others)]
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
        for reader in readers:
            assert reader.error is None
            assert reader.text == text(20)
            assert [each.finish for each in reader.tokens] == [None] * 19 + ["length"]
        wanted = generates_of(backbone)
        assert [each.n_emitted for each in wanted] == [0] * 4
        assert {each.sampling for each in wanted} == {request().sampling}
        assert len({each.client for each in wanted}) == 4, "clients of two nodes are two"


async def test_sessions_go_on_when_their_backbone_is_killed(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone, others = await start(world)
        readers = [Reader(each, request()) for each in (*others, others[0])]
        await read_all(readers, backbone.crash)
        assert max(each.pause_s for each in readers) < PAUSE_MAX_S
        resumed = [each for node in others for each in generates_of(node)]
        assert len(resumed) == len(readers), "each was gone on with once"
        for each in resumed:
            assert each.token_ids == (1, 2, 3, *text(each.n_emitted))
            assert each.n_emitted >= 15
            assert each.n_tokens == 60 - each.n_emitted
            assert each.sampling == request().sampling


async def test_death_during_recovery_is_another_failover(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    """The second one dies when it has been asked to go on; the first one comes back, so there is a quorum."""
    async with open_nodes(model, tmp_path) as world:
        backbone, others = await start(world)
        readers = [Reader(each, request(80)) for each in others]
        lost: list[Reader] = []

        async def kill_two() -> None:
            await backbone.crash()
            await until(lambda: any(generates_of(each) for each in others))
            (second,) = [each for each in others if generates_of(each)]
            lost.extend(each for each in readers if each.node is second)
            await second.crash()
            backbone.start()

        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.read)
            await until(lambda: all(len(each.tokens) >= 15 for each in readers))
            await kill_two()
            left = [each for each in readers if each not in lost]
            await until(lambda: all(each.is_over for each in left))
            nursery.cancel_scope.cancel()
        assert len(left) == 2
        for reader in left:
            assert reader.error is None
            assert reader.text == text(80)


async def test_a_gateway_that_becomes_the_backbone_itself_goes_on_with_its_own_sessions(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone, others = await start(world, 3)
        readers = [Reader(each, request()) for each in others]
        await read_all(readers, backbone.crash)
        second = world.backbone
        assert second in others


async def test_a_backbone_that_stops_in_good_order_hands_its_sessions_over_without_a_timeout(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone, others = await start(world)
        reader = Reader(others[0], request())
        await read_all([reader], backbone.leave)
        assert reader.pause_s < 3.0


async def test_no_session_ends_when_a_worker_dies(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone, others = await start(world)
        readers = [Reader(each, request()) for each in (backbone, others[0], others[1])]
        await read_all(readers, others[2].crash)
        assert max(each.pause_s for each in readers) < 3.0
        assert len(generates_of(backbone)) == 3, "none was begun again"


async def test_a_client_that_leaves_ends_its_session_on_the_backbone_at_once(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone, others = await start(world)
        async with others[0].duty.completions.open(request()) as tokens:
            await anext(tokens)
            (engine,) = [each for each in backbone.engines.all if each.sessions]
            began = trio.current_time()
        await until(lambda: not engine.sessions)
        assert trio.current_time() - began < 1.0
