"""Lets go of connections that nobody uses, so that a large swarm does not keep one to everybody.

Whoever is looked up, probed once, or calls leaves a connection behind, up to the host's limit; each is probed
and has streams of gossip. Of those beyond `kept_max` the ones used longest ago are closed. Never one with a
stream of ours or a conversation on it (the cores' streams to the members a node watches, a request for data),
nor a neighbour in gossip's mesh, nor one that was just used. Whom to talk to is not decided here: who is let
go of is dialled again by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import structlog
import trio

from kvasir_proto.ids import NodeId

log = structlog.get_logger(__name__)


class ConnectionUse(NamedTuple):
    """A node that is connected: whether something of ours is under way with it, and when that was last so."""

    node_id: NodeId
    is_busy: bool
    used_at_s: float


class Connections(Protocol):
    """What is seen of the host here."""

    def connection_uses(self) -> tuple[ConnectionUse, ...]:
        """Every node that is connected."""

    async def disconnect(self, node_id: NodeId) -> None:
        """Drop every connection to a node."""


@dataclass(frozen=True, slots=True)
class IdleOptions:
    """How many connections are kept that nobody uses."""

    kept_max: int = 64
    """Connections, those in use among them, from which on idle ones are closed. A member watches 12 others
    and is watched by as many, gossip has 6 to 12 neighbours, the core speaks to 32 at a time.
    """
    idle_min_s: float = 60.0
    """A connection used more recently than this is kept all the same: who asked once may ask again."""
    check_interval_s: float = 10.0


def superfluous(
    uses: Iterable[ConnectionUse], neighbours: Collection[NodeId], now_s: float, options: IdleOptions
) -> tuple[NodeId, ...]:
    """Whose connections to close, those used longest ago first."""
    every = tuple(uses)
    idle = sorted(
        (each.used_at_s, each.node_id)
        for each in every
        if not each.is_busy
        and each.node_id not in neighbours
        and now_s - each.used_at_s >= options.idle_min_s
    )
    return tuple(node_id for _, node_id in idle[: max(0, len(every) - options.kept_max)])


class IdleConnections:
    """See the module. `neighbours` names gossip's neighbours now."""

    def __init__(
        self,
        host: Connections,
        neighbours: Callable[[], Collection[NodeId]],
        options: IdleOptions | None = None,
    ) -> None:
        self._host = host
        self._neighbours = neighbours
        self._options = IdleOptions() if options is None else options

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look now and then, until cancelled."""
        task_status.started()
        while True:
            await trio.sleep(self._options.check_interval_s)
            await self.trim()

    async def trim(self) -> None:
        """Close what is superfluous now."""
        now_s = trio.current_time()
        chosen = superfluous(self._host.connection_uses(), self._neighbours(), now_s, self._options)
        for node_id in chosen:
            # Closing waits for the other side, and meanwhile this one may have come into use.
            if any(each.node_id == node_id and each.is_busy for each in self._host.connection_uses()):
                continue
            log.debug("idle_connection_closed", node=node_id)
            await self._host.disconnect(node_id)
        await trio.lowlevel.checkpoint()
