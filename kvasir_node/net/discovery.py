"""Finding the swarm and staying found: keeps this node connected to a few members, for ever.

Candidates come from the configuration and invites, from last time, from this LAN and from records; while too
few of them are connected the others are tried, with growing patience when nobody answers, and nothing ever
ends because of that. It decides whom to try, not whom to trust, and how to dial is `Dialler`'s.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog
import trio

from kvasir_node.backoff import retry_delay_s
from kvasir_node.net.dialler import Dialler, grouped_by_node
from kvasir_node.ports import Connector
from kvasir_proto.errors import TransportUnavailable
from kvasir_proto.ids import NodeId

log = structlog.get_logger(__name__)


class RememberedMembers(Protocol):
    """Members of last time. `members_file.MembersFile` is the real one."""

    def load(self) -> dict[NodeId, tuple[str, ...]]:
        """What was saved last, or nothing."""

    async def save(self, members: Mapping[NodeId, tuple[str, ...]]) -> None:
        """Keep these for next time; never raises."""


class Lan(Protocol):
    """Announces this node on its LAN and reports others. `lan.LanDiscovery` is the real one."""

    async def run(self, found: Callable[[NodeId, tuple[str, ...]], None]) -> None:
        """Until cancelled."""


@dataclass(frozen=True, slots=True)
class DiscoveryOptions:
    """How many members to be connected to, and how patiently to look for them."""

    wanted: int = 6
    """While fewer candidates are connected the others are tried. Gossip's mesh has this degree."""
    batch: int = 8
    """Candidates tried at a time."""
    check_interval_s: float = 10.0
    """How often it is looked whether enough are connected."""
    retry_first_s: float = 1.0
    retry_max_s: float = 60.0
    """When no candidate answered at all. A swarm that comes back is found within this, and the attempts of a
    node alone cost it nothing to speak of.
    """
    candidates_max: int = 512
    """Nodes considered; the one heard of longest ago gives way, but never one from the configuration."""
    save_interval_s: float = 2.0
    """At most one write of the remembered members in this time, and none without news. A node that nobody was
    told of, as a founder, finds the others only by this file when it is killed and comes back elsewhere.
    """


@dataclass(frozen=True, slots=True)
class DiscoveryStatistics:
    """For `status`: whether this node is alone, and since how many attempts."""

    candidates: int
    connected: int
    rounds_without_answer: int
    last_failure: str


class Discovery:
    """See the module. `told` are addresses that end in a node's name, by configuration or invite."""

    def __init__(
        self,
        host: Connector,
        dialler: Dialler,
        *,
        told: Sequence[str],
        remembered: RememberedMembers,
        lan: Lan | None = None,
        entropy: random.Random,
        options: DiscoveryOptions | None = None,
    ) -> None:
        self._host = host
        self._dialler = dialler
        self._options = DiscoveryOptions() if options is None else options
        self._remembered = remembered
        self._lan = lan
        self._random = entropy
        self._told: dict[NodeId, None] = {}
        self._candidates: dict[NodeId, None] = {}
        self._save_due = False
        self._news = trio.Event()
        self._heard = trio.Event()
        self._failed_rounds = 0
        self._last_failure = ""
        for node_id, addresses in remembered.load().items():
            self._consider(node_id)
            dialler.learn(node_id, addresses, "remembered")
        self.tell(told)

    def tell(self, addresses: Sequence[str]) -> None:
        """Addresses by configuration or invite: their nodes stay candidates for good."""
        for node_id, group in grouped_by_node(addresses).items():
            if node_id != self._host.node_id:
                self._told[node_id] = None
                self._consider(node_id)
                self._dialler.learn(node_id, group, "told")
        self._news.set()

    def note_record(self, node_id: NodeId, addresses: Sequence[str]) -> None:
        """A member's own signed record says it is there. It is remembered for next time."""
        if node_id == self._host.node_id:
            return
        is_new = node_id not in self._candidates
        self._consider(node_id)
        if self._dialler.learn(node_id, addresses, "record"):
            self._news.set()
            is_new = True
        self._save_due = self._save_due or is_new

    def note_gone(self, node_id: NodeId) -> None:
        """A member left for good: it is no candidate any more, unless the configuration names it."""
        if node_id not in self._told:
            self._candidates.pop(node_id, None)
            self._dialler.forget(node_id)
            self._save_due = True

    def candidates(self) -> tuple[NodeId, ...]:
        """Nodes that may be members, those told first, then those heard of last; as many as seeds may be."""
        others = [each for each in reversed(self._candidates) if each not in self._told]
        return (*self._told, *others)[: self._options.candidates_max]

    async def wait_news(self) -> None:
        """Wait until somebody new was found, or someone's address has changed."""
        await self._heard.wait()

    def statistics(self) -> DiscoveryStatistics:
        """How it stands."""
        return DiscoveryStatistics(
            len(self._candidates), len(self._connected()), self._failed_rounds, self._last_failure
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look for members until cancelled."""
        async with trio.open_nursery() as nursery:
            if self._lan is not None:
                nursery.start_soon(self._lan.run, self._found_on_lan)
            nursery.start_soon(self._save_now_and_then)
            task_status.started()
            await self._seek()

    def _consider(self, node_id: NodeId) -> None:
        if node_id not in self._candidates:
            self._heard.set()
            self._heard = trio.Event()
        self._candidates.pop(node_id, None)
        self._candidates[node_id] = None
        if len(self._candidates) > self._options.candidates_max:
            oldest = next((each for each in self._candidates if each not in self._told), None)
            if oldest is not None:
                del self._candidates[oldest]

    def _found_on_lan(self, node_id: NodeId, addresses: tuple[str, ...]) -> None:
        if node_id == self._host.node_id:
            return
        self._consider(node_id)
        if self._dialler.learn(node_id, addresses, "lan"):
            log.info("member_found_on_lan", node=node_id)
            self._news.set()

    def _connected(self) -> list[NodeId]:
        return [each for each in self._candidates if self._host.is_connected(each)]

    async def _seek(self) -> None:
        while True:
            self._news = trio.Event()
            connected = self._connected()
            missing = self._options.wanted - len(connected)
            if missing > 0 and len(connected) < len(self._candidates):
                answered = await self._try_some(missing)
            else:
                answered = bool(connected) or not self._candidates
            if answered or self._connected():
                self._failed_rounds = 0
                pause_s = self._options.check_interval_s
            else:
                self._failed_rounds += 1
                pause_s = retry_delay_s(
                    self._failed_rounds, self._options.retry_first_s, self._options.retry_max_s
                )
                log.info("nobody_reached", candidates=len(self._candidates), retry_s=pause_s)
            with trio.move_on_after(pause_s * self._random.uniform(0.8, 1.2)):
                await self._news.wait()

    async def _try_some(self, missing: int) -> bool:
        """Dial candidates that are not connected: the told first, the others in any order."""
        waiting = [each for each in self._candidates if not self._host.is_connected(each)]
        others = [each for each in waiting if each not in self._told]
        self._random.shuffle(others)
        order = [each for each in waiting if each in self._told] + others
        reached = 0

        async def try_one(node_id: NodeId) -> None:
            nonlocal reached
            try:
                await self._dialler.reach(node_id)
                reached += 1
            except TransportUnavailable as error:
                self._last_failure = str(error)

        while order and reached < missing:
            batch, order = order[: self._options.batch], order[self._options.batch :]
            async with trio.open_nursery() as nursery:
                for node_id in batch:
                    nursery.start_soon(try_one, node_id)
        return reached > 0

    async def _save_now_and_then(self) -> None:
        while True:
            await trio.sleep(self._options.save_interval_s)
            if self._save_due:
                self._save_due = False
                await self.save()

    async def save(self) -> None:
        """Write down whom we know now, for next time: those connected first, then those heard of last."""
        connected = set(self._connected())
        newest = [*reversed(self._candidates)]
        newest.sort(key=lambda node_id: node_id not in connected)
        members = {node_id: self._dialler.addresses(node_id) for node_id in newest}
        await self._remembered.save({each: known for each, known in members.items() if known})
