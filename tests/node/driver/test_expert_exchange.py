"""Experts from member to member: as fast as allowed, to members only, and past whoever does not give them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.driver.expert_asking import ANSWER_TIMEOUT_S, ExpertAsker, Givers
from kvasir_node.driver.expert_giving import (
    ANSWER_SIZE_BYTES_MAX,
    IDLE_TIMEOUT_S,
    STREAMS_MAX,
    STREAMS_PER_MEMBER_MAX,
    ExpertGiver,
)
from kvasir_node.ports import EXPERTS_PROTOCOL
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import ConfigurationInvalid, LocalProtocolError, ModelUnusable
from kvasir_proto.expert_sources import ExpertRun, WantedExpert
from kvasir_proto.ids import ModelDigest, NodeId
from kvasir_proto.limits import EXPERT_PIECE_SIZE_MAX
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.experts import EXPERT_EXCHANGE, ExpertPiece, ExpertRequest
from kvasir_proto.messages.swarm import Refusal
from tests.node.driver.memory_network import MemoryHost, MemoryNetwork, MemoryStream
from tests.node.driver.twins import now

MODEL = bytes(range(32))
TENSOR = "blk.0.ffn_up_exps.weight"
SIZE = 300_000
N_EXPERT = 8
WHOLE = ShardSet(((0, 0, N_EXPERT),))
OWN, A, B, C = (NodeId(f"12D3KooWNode{each}") for each in "SABC")
TRUE = bytes(each % 251 for each in range(N_EXPERT * SIZE))
RATE = 100 << 20


class Shelf:
    """Experts in memory, of which some are missing."""

    def __init__(self, data: bytes = TRUE, missing: tuple[int, ...] = ()) -> None:
        self.data = data
        self.missing = missing
        self.read_bytes = 0

    async def read(self, tensor_name: str, first: int, end: int, offset: int, size_bytes_max: int) -> bytes:
        """See `ports.ExpertsHere`."""
        await trio.lowlevel.checkpoint()
        if tensor_name != TENSOR or end > N_EXPERT:
            raise LocalProtocolError("no such expert")
        begin = first * SIZE + offset
        here = [each for each in self.missing if (each + 1) * SIZE > begin]
        stop = min([end * SIZE, begin + size_bytes_max, *(each * SIZE for each in here)])
        self.read_bytes += max(0, stop - begin)
        return self.data[begin:stop]


class Intake:
    """Takes experts in and compares them with what they should be."""

    def __init__(self) -> None:
        self.here = [bytearray() for _ in range(N_EXPERT)]
        self.came: dict[str, int] = {}

    def wanted(self) -> list[WantedExpert]:
        return [
            WantedExpert(TENSOR, 0, each, SIZE, len(self.here[each]))
            for each in range(N_EXPERT)
            if len(self.here[each]) < SIZE
        ]

    async def take(self, run: ExpertRun, offset: int, data: bytes, giver: str) -> tuple[WantedExpert, ...]:
        """See `ports.TakeExperts`."""
        await trio.lowlevel.checkpoint()
        self.came[giver] = self.came.get(giver, 0) + len(data)
        damaged = []
        for each in run.experts:
            if offset >= SIZE:
                offset -= SIZE
                continue
            part, data = data[: SIZE - offset], data[SIZE - offset :]
            if not part:
                break
            assert len(self.here[each.expert]) in (offset, SIZE), "a byte came twice or never"
            del self.here[each.expert][offset:]
            self.here[each.expert] += part
            true = TRUE[each.expert * SIZE : (each.expert + 1) * SIZE]
            if len(self.here[each.expert]) == SIZE and self.here[each.expert] != true:
                self.here[each.expert].clear()
                damaged.append(each)
            offset = 0
        return tuple(damaged)


class Case:
    """One node that asks, and what it is told of others."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.host = network.host(OWN)
        self.holders: dict[NodeId, ShardSet] = {}
        self.others: list[NodeId] = []
        self.intake = Intake()
        self.givers: dict[NodeId, ExpertGiver] = {}
        self.n_streams: dict[NodeId, int] = {}
        self.asker = ExpertAsker(
            MODEL, self.host, self._reach, lambda: Givers(self.holders, self.others), now
        )

    async def _reach(self, node_id: NodeId) -> None:
        await self.network.check_reachable(OWN, node_id)

    def give(self, node_id: NodeId, shelf: Shelf, rate: int = RATE, *, says: bool = True) -> ExpertGiver:
        """A member that gives what is on this shelf, and says that it holds everything or nothing."""
        giver = ExpertGiver(MODEL, shelf, lambda asking: asking == OWN, rate, now)
        self.serve(node_id, giver.serve_stream, says=says)
        return giver

    def serve(
        self, node_id: NodeId, handler: Callable[[NodeId, Any], Awaitable[None]], *, says: bool = True
    ) -> None:
        async def counted(asking: NodeId, stream: MemoryStream) -> None:
            self.n_streams[node_id] = self.n_streams.get(node_id, 0) + 1
            await handler(asking, stream)

        self.network.host(node_id).set_stream_handler(counted, EXPERTS_PROTOCOL)
        if says:
            self.holders[node_id] = WHOLE
        else:
            self.others.append(node_id)

    async def fetch(self, **options: bool) -> float:
        """Fetch what is missing; how many seconds that took."""
        begin = trio.current_time()
        await self.asker.fetch(self.intake.wanted(), self.intake.take, **options)
        return trio.current_time() - begin

    def check_whole(self) -> None:
        assert self.intake.wanted() == []
        assert b"".join(self.intake.here) == TRUE


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    async with trio.open_nursery() as nursery:
        yield Case(MemoryNetwork(nursery))
        nursery.cancel_scope.cancel()


async def test_experts_come_from_several_holders_each_byte_once(
    autojump_clock: MockClock, case: Case
) -> None:
    shelves = [Shelf(), Shelf(), Shelf()]
    for node_id, shelf in zip((A, B, C), shelves, strict=True):
        case.give(node_id, shelf)
    case.holders = {A: ShardSet(((0, 0, 3),)), B: ShardSet(((0, 3, 5),)), C: ShardSet(((0, 5, 8),))}
    await case.fetch()
    case.check_whole()
    assert case.intake.came == {f"node {A}": 3 * SIZE, f"node {B}": 2 * SIZE, f"node {C}": 3 * SIZE}
    assert sum(each.read_bytes for each in shelves) == len(TRUE)


async def test_a_rate_is_kept_for_all_streams_together(autojump_clock: MockClock, case: Case) -> None:
    giver = case.give(A, Shelf(), rate=200_000)
    took_s = await case.fetch()
    case.check_whole()
    assert giver.given_bytes == len(TRUE)
    assert 0.95 * len(TRUE) / 200_000 < took_s < 1.1 * len(TRUE) / 200_000 + 1


async def test_who_is_too_slow_is_passed_over_and_what_came_of_it_is_kept(
    autojump_clock: MockClock, case: Case
) -> None:
    case.give(A, Shelf(), rate=ANSWER_SIZE_BYTES_MAX // int(2 * ANSWER_TIMEOUT_S))
    assert ANSWER_TIMEOUT_S <= await case.fetch() < 2 * ANSWER_TIMEOUT_S
    assert 0 < case.intake.came[f"node {A}"] < ANSWER_SIZE_BYTES_MAX
    case.give(B, Shelf())
    await case.fetch()
    case.check_whole()
    assert case.n_streams[A] == 1, "it is not asked again so soon"
    assert case.intake.came[f"node {A}"] + case.intake.came[f"node {B}"] == len(TRUE), "at the byte"


@pytest.mark.parametrize("is_patient", [True, False])
async def test_who_has_an_address_to_ask_waits_less_for_members(
    autojump_clock: MockClock, case: Case, is_patient: bool
) -> None:
    giver = case.give(A, Shelf(), rate=100_000)  # 1 MiB in 10 s
    await case.fetch(is_patient=is_patient)
    assert (giver.given_bytes == len(TRUE)) == is_patient


async def test_damaged_experts_are_fetched_from_others_and_who_gave_them_is_left_alone(
    autojump_clock: MockClock, case: Case
) -> None:
    case.give(A, Shelf(bytes(len(TRUE))))
    case.give(B, Shelf())
    del case.holders[B]
    await case.fetch()
    assert len(case.intake.wanted()) == N_EXPERT
    case.holders[B] = WHOLE
    await case.fetch()
    case.check_whole()
    assert case.n_streams[A] == 1


async def test_one_damaged_expert_costs_its_giver_and_not_what_was_right(
    autojump_clock: MockClock, case: Case
) -> None:
    bad = bytearray(TRUE)
    bad[3 * SIZE + 5] ^= 1
    case.give(A, Shelf(bytes(bad)))
    await case.fetch()
    assert next(each.expert for each in case.intake.wanted()) == 3
    assert len(case.intake.here[0]) == SIZE
    case.give(B, Shelf())
    await case.fetch()
    case.check_whole()


async def test_who_finishes_what_another_began_wrong_is_not_blamed(
    autojump_clock: MockClock, case: Case
) -> None:
    case.intake.here[0] += b"\xff" * 1000
    case.give(A, Shelf())
    await case.fetch()
    case.check_whole()
    assert case.intake.came[f"node {A}"] == len(TRUE) - 1000 + SIZE


async def refuse(_node_id: NodeId, stream: Any) -> None:
    await stream.receive(60.0)
    await stream.send(encode(Refusal("not_given", "no")))


async def be_silent(_node_id: NodeId, _stream: Any) -> None:
    await trio.sleep(3600)


async def end(_node_id: NodeId, stream: Any) -> None:
    await stream.receive(60.0)


async def talk_nonsense(_node_id: NodeId, stream: Any) -> None:
    await stream.send(b"\xc1 nonsense")
    await trio.sleep(3600)


async def ask_back(_node_id: NodeId, stream: Any) -> None:
    await stream.send(await stream.receive(60.0))
    await trio.sleep(3600)


async def never_end(_node_id: NodeId, stream: Any) -> None:
    while True:
        await stream.send(encode(ExpertPiece(bytes(EXPERT_PIECE_SIZE_MAX), False)))


async def drip(_node_id: NodeId, stream: Any) -> None:
    while True:
        await stream.send(encode(ExpertPiece(b"\0", False)))
        await trio.sleep(1.0)


@pytest.mark.parametrize("behaviour", [refuse, be_silent, end, talk_nonsense, ask_back, never_end, drip])
async def test_a_bad_holder_costs_one_attempt_of_bounded_time(
    autojump_clock: MockClock, case: Case, behaviour: Any
) -> None:
    case.serve(A, behaviour)
    case.give(B, Shelf())
    case.holders[B] = ShardSet(((0, 4, 8),))
    assert await case.fetch() <= 2 * ANSWER_TIMEOUT_S + 1
    case.holders[B] = WHOLE
    await case.fetch()
    await case.fetch()
    case.check_whole()
    assert case.n_streams[A] == 1


async def test_a_holder_that_nobody_reaches_is_passed_over(autojump_clock: MockClock, case: Case) -> None:
    case.holders[A] = WHOLE
    case.give(B, Shelf())
    await case.fetch()
    case.check_whole()


async def test_a_holder_without_a_usable_address_is_passed_over(
    autojump_clock: MockClock, case: Case
) -> None:
    async def reach(node_id: NodeId) -> None:
        await trio.lowlevel.checkpoint()
        if node_id == A:
            raise ConfigurationInvalid("that is no address")

    case.asker = ExpertAsker(MODEL, case.host, reach, lambda: Givers(case.holders, ()), now)
    case.give(A, Shelf())
    case.give(B, Shelf())
    await case.fetch()
    case.check_whole()
    assert A not in case.n_streams


async def test_who_holds_less_than_it_says_gives_what_it_has(autojump_clock: MockClock, case: Case) -> None:
    case.give(A, Shelf(missing=(2, 3)))
    case.give(B, Shelf(missing=(0,)), says=False)
    await case.fetch()
    case.check_whole()
    assert case.intake.came[f"node {A}"] >= 2 * SIZE


async def test_who_says_nothing_may_have_the_whole_file(autojump_clock: MockClock, case: Case) -> None:
    case.give(A, Shelf(missing=tuple(range(N_EXPERT))), says=False)
    case.give(B, Shelf(), says=False)
    await case.fetch()
    case.check_whole()


async def test_the_disks_refusal_ends_the_fetch(autojump_clock: MockClock, case: Case) -> None:
    case.give(A, Shelf())

    async def take(*_: Any) -> tuple[WantedExpert, ...]:
        await trio.lowlevel.checkpoint()
        raise ModelUnusable("the disk is full")

    with pytest.raises(ModelUnusable, match="full"):
        await case.asker.fetch(case.intake.wanted(), take)


# -- the giver, whoever asks -----------------------------------------------------------------------


@asynccontextmanager
async def asking(case: Case, giver: NodeId, host: MemoryHost | None = None) -> AsyncIterator[MemoryStream]:
    stream = await (host or case.host).open_stream(giver, EXPERTS_PROTOCOL)
    yield stream
    await stream.close()


async def hear(stream: MemoryStream) -> Any:
    return decode(await stream.receive(60.0), EXPERT_EXCHANGE)


def request(**changes: Any) -> ExpertRequest:
    fields: dict[str, Any] = {
        "model_digest": ModelDigest(MODEL),
        "tensor": TENSOR,
        "first": 0,
        "end": 8,
        "offset": 0,
    }
    return ExpertRequest(**(fields | changes))


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"model_digest": ModelDigest(bytes(32))}, "wrong_model"),
        ({"tensor": "blk.0.attn_q.weight"}, "no_such_expert"),
        ({"end": 9}, "no_such_expert"),
        ({"first": 7}, "not_held"),
    ],
)
async def test_what_is_not_here_is_refused(
    autojump_clock: MockClock, case: Case, changes: dict[str, Any], code: str
) -> None:
    case.give(A, Shelf(missing=(7,)))
    async with asking(case, A) as stream:
        await stream.send(encode(request(**changes)))
        refusal = await hear(stream)
        assert isinstance(refusal, Refusal)
        assert refusal.code == code


async def test_after_what_is_not_held_it_may_be_asked_for_something_else(
    autojump_clock: MockClock, case: Case
) -> None:
    case.give(A, Shelf(missing=(7,)))
    async with asking(case, A) as stream:
        await stream.send(encode(request(first=7)))
        assert isinstance(await hear(stream), Refusal)
        await stream.send(encode(request(end=1, offset=SIZE - 5)))
        assert await hear(stream) == ExpertPiece(TRUE[SIZE - 5 : SIZE], True)


async def test_strangers_get_nothing(autojump_clock: MockClock, case: Case) -> None:
    shelf = Shelf()
    case.give(A, shelf)
    async with asking(case, A, case.network.host(C)) as stream:
        await stream.send(encode(request()))
        assert (await hear(stream)).code == "not_a_member"
    assert shelf.read_bytes == 0


async def test_a_node_that_gives_nothing_says_so(autojump_clock: MockClock, case: Case) -> None:
    shelf = Shelf()
    case.give(A, shelf, rate=0)
    async with asking(case, A) as stream:
        await stream.send(encode(request()))
        assert (await hear(stream)).code == "not_given"
    assert shelf.read_bytes == 0


async def test_an_answer_has_a_bound_and_says_where_it_ends(autojump_clock: MockClock, case: Case) -> None:
    case.give(A, Shelf())
    async with asking(case, A) as stream:
        await stream.send(encode(request()))
        data, pieces = b"", 0
        while True:
            piece = await hear(stream)
            data += piece.data
            pieces += 1
            if piece.is_last:
                break
        assert data == TRUE[:ANSWER_SIZE_BYTES_MAX]
        assert pieces == ANSWER_SIZE_BYTES_MAX // EXPERT_PIECE_SIZE_MAX


async def test_streams_are_bounded_for_each_member_and_for_all(autojump_clock: MockClock, case: Case) -> None:
    members = [NodeId(f"12D3KooWMember{each}") for each in range(STREAMS_MAX)]
    giver = ExpertGiver(MODEL, Shelf(), lambda _: True, RATE, now)
    case.network.host(A).set_stream_handler(giver.serve_stream, EXPERTS_PROTOCOL)
    open_streams = []

    async def code_of(member: NodeId) -> str:
        stream = await case.network.host(member).open_stream(A, EXPERTS_PROTOCOL)
        open_streams.append(stream)
        await stream.send(encode(request(end=1)))
        answer = await hear(stream)
        return answer.code if isinstance(answer, Refusal) else "given"

    assert [await code_of(members[0]) for _ in range(STREAMS_PER_MEMBER_MAX + 1)] == ["given"] * 2 + ["busy"]
    assert [await code_of(each) for each in members[1:]] == ["given"] * (STREAMS_MAX - 2) + ["busy"]
    await trio.sleep(IDLE_TIMEOUT_S + 1)
    assert await code_of(members[0]) == "given", "who asks nothing keeps nobody's place"


async def test_a_member_that_takes_nothing_holds_up_nobody_else(
    autojump_clock: MockClock, case: Case
) -> None:
    case.give(A, Shelf())
    async with asking(case, A) as stream:
        await stream.send(encode(request()))
        took_s = await case.fetch()
        case.check_whole()
        assert took_s < 5.0
        assert isinstance(await hear(stream), ExpertPiece)
