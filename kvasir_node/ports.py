"""The ports: what a duty may expect of the world, and the guarantees behind each call.

Duties see these and no adapter. `app` gives them the real ones, tests give them twins in memory, and both
answer to the guarantees written here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import trio

from kvasir_proto.errors import EngineFailed
from kvasir_proto.ids import NodeId
from kvasir_proto.limits import Role
from kvasir_proto.messages.engine import EngineMessage

ReplyT = TypeVar("ReplyT")


class ControlStream(Protocol):
    """A stream of whole messages to one authenticated node.

    Messages arrive whole, in order and at most once, or the stream ends. The other end's node id was proved
    by the transport before the stream was handed over.
    """

    async def send(self, body: bytes) -> None:
        """Queue a message; may wait while the queue is full. Raises `TransportUnavailable` at the end."""

    async def receive(self, timeout_s: float) -> bytes:
        """The next message. Raises `TransportUnavailable` at the end, or when ``timeout_s`` passes."""

    async def close(self) -> None:
        """End the stream; never waits for the other side."""


class Host(Protocol):
    """This node's place in the network."""

    @property
    def node_id(self) -> NodeId:
        """Our own id."""

    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses at which others reach us, our id included; never a wildcard."""

    async def connect(self, address: str | Sequence[str]) -> NodeId:
        """Be connected to the node at this multiaddress, or at one of these, which all end in its id.

        Returns only when the other end has proved that id. Raises `TransportUnavailable` within a bounded
        time otherwise.
        """

    async def open_stream(self, node_id: NodeId) -> ControlStream:
        """A fresh stream to a node we have an address of. Raises `TransportUnavailable` in bounded time."""


class EnginePort(Protocol):
    """A running engine process, from start to end. `supervisor.Engine` says more."""

    pid: int
    backend: str
    certificate: bytes
    events: trio.MemoryReceiveChannel[EngineMessage]

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""

    def next_request(self) -> int:
        """A request number never used before on this engine."""

    async def send(self, message: EngineMessage) -> None:
        """Send; `EngineFailed` when it is gone."""

    async def exchange(
        self,
        message: EngineMessage | None,
        reply_type: type[ReplyT] | tuple[type[ReplyT], ...],
        timeout_s: float,
        *,
        where: Callable[[Any], bool] = ...,
    ) -> ReplyT:
        """Send and wait for the matching reply; raises the engine's fault, or `EngineFailed`."""

    async def statistics_json(self, timeout_s: float = ...) -> str:
        """Its counters as one JSON object; raises like `exchange`."""

    def kill(self, reason: str) -> None:
        """End it at once; ``reason`` is why, for `wait_ended`."""

    async def wait_ended(self) -> str:
        """Wait for its end; the reason."""

    def end_error(self, sentence: str) -> EngineFailed:
        """The error that tells of its end: `ModelAborted` where llama.cpp gave up on the model."""

    async def close(self) -> None:
        """End it within a bounded time."""


class EngineStarter(Protocol):
    """Starts engines for this node."""

    async def __call__(self, nursery: trio.Nursery, role: Role, generation: int) -> EnginePort:
        """A started, introduced engine that lives at most as long as ``nursery``."""


class FenceStore(Protocol):
    """Remembers the highest proven (epoch, term) across restarts.

    `save` returns only when the pair would survive a power cut, so that an engine never hears of a fence
    that could be forgotten.
    """

    def load(self) -> tuple[int, int]:
        """The pair saved last, or (0, 0)."""

    def save(self, epoch: int, term: int) -> None:
        """Persist a pair that is not lower than the one before."""


def engine_report(engine: EnginePort | None) -> dict[str, Any] | None:
    """What a status report says about an engine process; None where none runs."""
    return None if engine is None else {"pid": engine.pid, "backend": engine.backend}
