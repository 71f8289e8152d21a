"""Experts from other members, several of them at once.

Decides how one member is asked and when that is given up: an answer has one deadline, what is no answer ends
the stream, and whatever came before is kept. Who is asked for what, and who is passed over, is
`kvasir_proto.expert_sources`' part; whether bytes are right the intake says, by the manifest's digests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple

import trio

from kvasir_node.driver.expert_giving import ANSWER_SIZE_BYTES_MAX
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import EXPERTS_PROTOCOL, ControlStream, Host, SwarmCore, TakeExperts
from kvasir_node.telemetry import get_logger
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import KvasirError, ModelUnusable, RemoteProtocolError, TransportUnavailable
from kvasir_proto.expert_sources import (
    ExpertRun,
    ExpertSources,
    Fault,
    PassedOver,
    WantedExpert,
    rest_of,
)
from kvasir_proto.ids import ModelDigest, NodeId
from kvasir_proto.instants import Instant
from kvasir_proto.manifest import ShardSet
from kvasir_proto.membership.states import LIVE
from kvasir_proto.messages.experts import EXPERT_EXCHANGE, ExpertPiece, ExpertRequest
from kvasir_proto.messages.swarm import Refusal

log = get_logger()

ANSWER_TIMEOUT_S: Final = 20.0
"""For one answer of 1 MiB at most: whoever gives less than 50 KiB a second is passed over for others."""
HURRIED_ANSWER_TIMEOUT_S: Final = 4.0
"""The same where there is an address too, which may give more than the 256 KiB a second of such a member."""


class Givers(NamedTuple):
    """Whom to ask: who says what it holds, and who else is there, the likeliest first."""

    holders: Mapping[NodeId, ShardSet]
    others: Sequence[NodeId]


class _Refused(Exception):
    """A member says why it does not give what it was asked for."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.code = refusal.code


@dataclass(slots=True)
class _Asked:
    """What came of asking one member for one run."""

    came_bytes: int = 0
    damaged: tuple[WantedExpert, ...] = ()
    fault: Fault | None = None
    not_held: bool = False
    reason: str = ""


class ExpertAsker:
    """This node's asking; one for all its duties, so that what one learns of a member the others know."""

    def __init__(
        self,
        model_digest: bytes,
        host: Host,
        reach: Callable[[NodeId], Awaitable[None]],
        givers: Callable[[], Givers],
        now: Callable[[], Instant],
    ) -> None:
        """``reach`` is `SwarmNetwork.reach`."""
        self._model_digest = ModelDigest(model_digest)
        self._host = host
        self._reach = reach
        self._givers = givers
        self._now = now
        self._passed_over = PassedOver()

    async def fetch(
        self, wanted: Sequence[WantedExpert], take: TakeExperts, *, is_patient: bool = True
    ) -> None:
        """See `ports.ExpertMembers`."""
        timeout_s = ANSWER_TIMEOUT_S if is_patient else HURRIED_ANSWER_TIMEOUT_S
        sources = ExpertSources(wanted, self._host.node_id, self._passed_over)
        n_asked = 0
        ended = trio.Event()

        async def ask(node_id: NodeId, run: ExpertRun) -> None:
            nonlocal n_asked
            asked = await self._ask(node_id, run, take, timeout_s)
            self._judge(node_id, run, asked)
            again = [replace(each, begun_bytes=0) for each in asked.damaged]
            left = (*rest_of(run, asked.came_bytes), *again)
            sources.take_back(node_id, left, not_held=asked.not_held)
            n_asked -= 1
            ended.set()

        async with open_unwrapping_nursery() as nursery:
            while sources.n_left or n_asked:
                holders, others = self._givers()
                while (task := sources.next_run(holders, others, self._now())) is not None:
                    n_asked += 1
                    nursery.start_soon(ask, *task)
                if not n_asked:
                    break
                await ended.wait()
                ended = trio.Event()

    def _judge(self, node_id: NodeId, run: ExpertRun, asked: _Asked) -> None:
        """Remember who is not to be asked for a while."""
        first = run.experts[0]
        # Of one that somebody else began nobody knows who gave the wrong bytes; the next one gives it whole.
        own_damage = [each for each in asked.damaged if each != first or not first.begun_bytes]
        fault: Fault | None = "damaged" if own_damage else asked.fault
        if fault is not None:
            self._passed_over.note_fault(node_id, fault, self._now())
            reason = asked.reason or f"expert {own_damage[0].expert} of {own_damage[0].tensor} is damaged"
            log.warning("giver_passed_over", node=node_id, fault=fault, reason=reason)
        elif asked.came_bytes and not asked.damaged:
            self._passed_over.note_given(node_id)

    async def _ask(self, node_id: NodeId, run: ExpertRun, take: TakeExperts, timeout_s: float) -> _Asked:
        asked = _Asked()
        try:
            await self._reach(node_id)
            stream = await self._host.open_stream(node_id, EXPERTS_PROTOCOL)
            try:
                await self._ask_on(node_id, stream, run, take, timeout_s, asked)
            finally:
                await stream.close()
        except _Refused as refused:
            asked.not_held = refused.code == "not_held"
            if not asked.not_held:
                asked.fault, asked.reason = "busy" if refused.code == "busy" else "failed", str(refused)
        except ModelUnusable:
            raise  # of our own disk
        except (KvasirError, RemoteProtocolError) as error:  # its record's addresses may be of no use, too
            asked.fault, asked.reason = "failed", str(error)
        return asked

    async def _ask_on(
        self,
        node_id: NodeId,
        stream: ControlStream,
        run: ExpertRun,
        take: TakeExperts,
        timeout_s: float,
        asked: _Asked,
    ) -> None:
        first, begun_bytes = run.experts[0], run.experts[0].begun_bytes
        wanted_bytes = run.size_bytes - begun_bytes
        while asked.came_bytes < wanted_bytes and not asked.damaged:
            offset = begun_bytes + asked.came_bytes
            request = ExpertRequest(
                self._model_digest, first.tensor, first.expert, run.experts[-1].expert + 1, offset
            )
            data = bytearray()
            try:
                with trio.fail_after(timeout_s):
                    await stream.send(encode(request))
                    left_bytes = min(ANSWER_SIZE_BYTES_MAX, wanted_bytes - asked.came_bytes)
                    await _hear_answer(stream, left_bytes, data)
            except trio.TooSlowError:
                raise TransportUnavailable("it is too slow") from None
            finally:
                if data:  # also of an answer that broke off
                    with trio.CancelScope(shield=True):
                        asked.damaged = await take(run, offset, bytes(data), f"node {node_id}")
                    asked.came_bytes += len(data)


async def _hear_answer(stream: ControlStream, size_bytes_max: int, data: bytearray) -> None:
    """Put the pieces of one answer into ``data`` as they come."""
    while True:
        message = decode(await stream.receive(ANSWER_TIMEOUT_S), EXPERT_EXCHANGE)
        if isinstance(message, Refusal):
            raise _Refused(message)
        if not isinstance(message, ExpertPiece):
            raise RemoteProtocolError(f"{message.kind} is no answer", "unexpected_message")
        if len(data) + len(message.data) > size_bytes_max:
            raise RemoteProtocolError("it gives more than it was asked for", "oversize")
        data += message.data
        if message.is_last:
            return


def givers_of(core: SwarmCore, own: NodeId) -> Givers:
    """Members that hold experts, by their records and the newest plan, and the others, the backbone first."""
    view = core.view()
    holders: dict[NodeId, ShardSet] = {}
    others: list[NodeId] = []
    for member in view.members:
        record = core.record_of(member.node_id)
        if record is None or member.node_id == own or member.state not in LIVE:
            continue
        held = record.held
        if held is None or not held.n_pairs:
            others.append(member.node_id)
        elif held.ranges is not None:
            try:
                holders[member.node_id] = _shard_of(held.ranges)
            except RemoteProtocolError:
                continue
        elif view.plan is not None:
            holders[member.node_id] = view.plan.shard_of(member.node_id)
    backbone = view.fence.backbone if view.fence is not None else None
    # Who holds a part may have the whole model's file.
    return Givers(holders, sorted((*others, *holders), key=lambda each: (each != backbone, each)))


@lru_cache(maxsize=512)
def _shard_of(data: bytes) -> ShardSet:
    return ShardSet.decode(data)
