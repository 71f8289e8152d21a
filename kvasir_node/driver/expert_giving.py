"""Experts for other members: what is on this disk, to members only, and no faster than the user allows.

Decides who is answered, how many streams are served at once and at which rate all of them together. Bytes
leave in small pieces with a pause between them, so that the leases and probes of the same process are never
behind many of them; files are read by the shelf, in a thread. What the bytes are worth, whoever asked finds
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

import trio

from kvasir_node.ports import ControlStream, ExpertsHere
from kvasir_node.telemetry import get_logger
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError, TransportUnavailable
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, between, in_seconds
from kvasir_proto.limits import EXPERT_PIECE_SIZE_MAX, as_sentence
from kvasir_proto.messages.experts import EXPERT_EXCHANGE, ExpertPiece, ExpertRequest
from kvasir_proto.messages.swarm import Refusal

log = get_logger()

ANSWER_SIZE_BYTES_MAX: Final = 1 << 20
"""Bytes of one answer, and so what is in flight to one member: a stream that is not read breaks otherwise."""
STREAMS_MAX: Final = 8
STREAMS_PER_MEMBER_MAX: Final = 2
IDLE_TIMEOUT_S: Final = 15.0
"""How long a member may ask nothing before its stream ends."""


class ExpertGiver:
    """Serves streams of `ports.EXPERTS_PROTOCOL`. ``bytes_per_second`` is for all members together."""

    def __init__(
        self,
        model_digest: bytes,
        shelf: ExpertsHere,
        is_member: Callable[[NodeId], bool],
        bytes_per_second: int,
        now: Callable[[], Instant],
    ) -> None:
        self._model_digest = model_digest
        self._shelf = shelf
        self._is_member = is_member
        self._bytes_per_second = bytes_per_second
        self._now = now
        self._streams: Counter[NodeId] = Counter()
        self._free_at = now()
        self.given_bytes = 0
        """How many bytes were given in all."""

    async def serve_stream(self, node_id: NodeId, stream: ControlStream) -> None:
        """Answer a member until it has asked everything."""
        refusal = self._refusal_of(node_id)
        if refusal is not None:
            await stream.send(encode(refusal))
            return
        self._streams[node_id] += 1
        try:
            while True:
                request = decode(await stream.receive(IDLE_TIMEOUT_S), EXPERT_EXCHANGE)
                if not isinstance(request, ExpertRequest):
                    raise RemoteProtocolError(f"{request.kind} is no question", "unexpected_message")
                await self._answer(stream, request)
        except TransportUnavailable:
            return  # it has all it wanted, or has gone
        except RemoteProtocolError as error:
            log.info("experts_refused", node=node_id, code=error.code, reason=error.reason)
            await stream.send(encode(Refusal(error.code, as_sentence(error.reason))))
        finally:
            self._streams[node_id] -= 1
            if not self._streams[node_id]:
                del self._streams[node_id]

    def _refusal_of(self, node_id: NodeId) -> Refusal | None:
        """Why nothing is given to that node now; None where something is."""
        if not self._bytes_per_second:
            return Refusal("not_given", "this node gives no experts to others")
        if not self._is_member(node_id):
            return Refusal("not_a_member", "experts are given to members only")
        if self._streams[node_id] >= STREAMS_PER_MEMBER_MAX or self._streams.total() >= STREAMS_MAX:
            return Refusal("busy", "experts are given to others just now")
        return None

    async def _answer(self, stream: ControlStream, request: ExpertRequest) -> None:
        if request.model_digest != self._model_digest:
            raise RemoteProtocolError("this node has another model", "wrong_model")
        try:
            data = await self._shelf.read(
                request.tensor, request.first, request.end, request.offset, ANSWER_SIZE_BYTES_MAX
            )
        except LocalProtocolError as error:
            raise RemoteProtocolError(error.reason, "no_such_expert") from error
        if not data:
            # Not the end of the conversation: it may ask for another one.
            await stream.send(encode(Refusal("not_held", "these experts are not here")))
            return
        for begin in range(0, len(data), EXPERT_PIECE_SIZE_MAX):
            piece = data[begin : begin + EXPERT_PIECE_SIZE_MAX]
            await self._wait_turn(len(piece))
            await stream.send(encode(ExpertPiece(piece, begin + len(piece) == len(data))))
            self.given_bytes += len(piece)

    async def _wait_turn(self, size_bytes: int) -> None:
        """Wait until so many bytes may leave; whoever came first leaves first."""
        now = self._now()
        at = max(now, self._free_at)
        self._free_at = after(at, Duration(size_bytes * 1_000_000_000 // self._bytes_per_second))
        await trio.sleep(in_seconds(between(now, at)))
