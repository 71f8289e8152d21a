"""Who is where, and when to try again: every dial of this node goes through here.

Keeps, for each node, the addresses that each source gave (its own signed record, this LAN, an invite or the
configuration, last time, what others said), tries them in that order by `ports.Host.connect`, a bounded
number of nodes at a time, and waits longer after each failure in a row. It does not decide who should be
connected, and knows no libp2p: the host proves that the node answering is the one meant.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import structlog
import trio

from kvasir_node.backoff import retry_delay_s
from kvasir_node.ports import Connector
from kvasir_proto.errors import ConfigurationInvalid, TransportUnavailable
from kvasir_proto.ids import NodeId, is_node_id

AddressSource: TypeAlias = Literal["record", "lan", "told", "remembered", "heard"]
"""Where an address is from, most trusted first: the node's own signed record, an announcement on this LAN, an
invite or the configuration, the last run, what another node said.
"""
SOURCES: Final[tuple[AddressSource, ...]] = ("record", "lan", "told", "remembered", "heard")
_FROM_STRANGERS: Final = frozenset({"record", "lan", "heard"})
_ADDRESS: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/\s]{1,255})/tcp/([0-9]{1,5})(?:/p2p/(\w{1,64}))?")
_GIVEN_UP_S: Final = 1.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DiallerOptions:
    """How many are dialled, and how patiently."""

    dials_max: int = 8
    """Nodes dialled at one time. A dial of a dead address holds its place for the host's dial timeout."""
    addresses_max: int = 8
    """Addresses kept for each node and source, and tried in one dial. More only share the same time."""
    nodes_max: int = 4096
    """Nodes whose addresses are kept; of those that others only spoke of the oldest gives way."""
    retry_first_s: float = 1.0
    retry_max_s: float = 60.0
    """After failures in a row a node is left alone this long at most. Raising it saves dials to the dead,
    and makes a node that comes back without telling anybody unreachable from here for as long.
    """


@dataclass(slots=True)
class _Whereabouts:
    addresses: dict[AddressSource, tuple[str, ...]] = field(default_factory=dict)
    failures_in_a_row: int = 0
    not_before: float = float("-inf")
    last_failure: str = ""
    dialling: trio.Lock = field(default_factory=trio.Lock)


@dataclass(frozen=True, slots=True)
class DiallerStatistics:
    """What the dialler did so far."""

    nodes_known: int
    dials: int
    failures: int
    refused_early: int
    """Asked for again before their time."""


class Dialler:
    """See the module. One for each host; calls may come from any task."""

    def __init__(self, host: Connector, options: DiallerOptions | None = None) -> None:
        self._host = host
        self._options = DiallerOptions() if options is None else options
        self._known: dict[NodeId, _Whereabouts] = {}
        self._places = trio.CapacityLimiter(self._options.dials_max)
        self._dials = 0
        self._failures = 0
        self._refused_early = 0

    def learn(self, node_id: NodeId, addresses: Iterable[str], source: AddressSource) -> bool:
        """Take what `source` says now in place of what it said before; whether that was news.

        What is no address of that node is left out, and so are loopback addresses that strangers name unless
        this node itself is at one: they would make us knock at our own machine's doors. News make a node that
        is waiting for its next try be tried at once.
        """
        if node_id == self._host.node_id:
            return False
        strict = source in _FROM_STRANGERS and not any(map(_is_loopback, self._host.addresses()))
        kept = []
        for address in addresses:
            whole = address_of(node_id, address)
            if whole is not None and whole not in kept and not (strict and _is_loopback(whole)):
                kept.append(whole)
            if len(kept) == self._options.addresses_max:
                break
        known = self._known.pop(node_id, None) or _Whereabouts()
        self._known[node_id] = known
        if len(self._known) > self._options.nodes_max:
            self._make_room(node_id)
        before = self._candidates(known)
        if kept:
            known.addresses[source] = tuple(kept)
        else:
            known.addresses.pop(source, None)
        news = not set(self._candidates(known)) <= set(before)
        if news and source != "heard":
            known.not_before = float("-inf")
        return news

    def forget(self, node_id: NodeId) -> None:
        """Drop all that is known of a node."""
        self._known.pop(node_id, None)

    def addresses(self, node_id: NodeId) -> tuple[str, ...]:
        """The addresses a dial would try, in order."""
        known = self._known.get(node_id)
        return () if known is None else self._candidates(known)

    def statistics(self) -> DiallerStatistics:
        """Counts since the start."""
        return DiallerStatistics(len(self._known), self._dials, self._failures, self._refused_early)

    async def reach(self, node_id: NodeId, *, insist: bool = False) -> None:
        """Be connected to that node.

        Raises `TransportUnavailable`: at once when no address is known or its next try is not yet due (unless
        `insist`), otherwise when no address answered in the host's time. Whoever asks while a dial of the
        node is under way shares its outcome.
        """
        if self._host.is_connected(node_id):
            await trio.lowlevel.checkpoint()
            return
        known = self._known.get(node_id)
        if known is None or not known.addresses:
            await trio.lowlevel.checkpoint()
            raise TransportUnavailable(f"no address of node {node_id} is known")
        failures_before = known.failures_in_a_row
        async with known.dialling:
            if self._host.is_connected(node_id):
                return
            shared = known.failures_in_a_row != failures_before
            if shared or (not insist and trio.current_time() < known.not_before):
                self._refused_early += 1
                wait_s = max(0.0, known.not_before - trio.current_time())
                raise TransportUnavailable(f"{known.last_failure} (next try in {wait_s:.0f} s)")
            async with self._places:
                await self._dial(node_id, known)

    async def _dial(self, node_id: NodeId, known: _Whereabouts) -> None:
        self._dials += 1
        started_s = trio.current_time()
        try:
            await self._host.connect(self._candidates(known))
        except (TransportUnavailable, ConfigurationInvalid) as error:
            self._postpone(node_id, known, str(error))
            raise TransportUnavailable(str(error)) from None
        except trio.Cancelled:
            # Somebody with less patience than the host. Else a silent node would be dialled for each of them.
            if trio.current_time() - started_s >= _GIVEN_UP_S:
                self._postpone(node_id, known, f"node {node_id} did not answer in time")
            raise
        known.failures_in_a_row = 0
        known.not_before = float("-inf")

    def _postpone(self, node_id: NodeId, known: _Whereabouts, reason: str) -> None:
        self._failures += 1
        known.failures_in_a_row += 1
        known.last_failure = reason
        delay_s = retry_delay_s(
            known.failures_in_a_row, self._options.retry_first_s, self._options.retry_max_s
        )
        known.not_before = trio.current_time() + delay_s
        log.debug("dial_failed", node=node_id, reason=reason, retry_s=delay_s)

    def _make_room(self, newcomer: NodeId) -> None:
        """Drop the oldest that others only spoke of: talk displaces nobody. If there is none, the oldest."""
        talk = (each for each, known in self._known.items() if set(known.addresses) <= {"heard"})
        oldest = next((each for each in talk if each != newcomer), next(iter(self._known)))
        del self._known[oldest]

    def _candidates(self, known: _Whereabouts) -> tuple[str, ...]:
        ordered: dict[str, None] = {}
        for source in SOURCES:
            ordered.update(dict.fromkeys(known.addresses.get(source, ())))
        return tuple(ordered)[: self._options.addresses_max]


def address_of(node_id: NodeId, address: str) -> str | None:
    """The address with the node's name at its end, or None for what is no address of that node."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return None
    kind, host, port, name = match.groups()
    if name not in (None, node_id) or not 0 < int(port) < 1 << 16:
        return None
    if kind in ("ip4", "ip6"):
        try:
            parsed = ipaddress.ip_address(host)
        except ValueError:
            return None
        if parsed.version != int(kind[2]) or parsed.is_unspecified or parsed.is_multicast:
            return None
    return address if name else f"{address}/p2p/{node_id}"


def node_of_address(address: str) -> NodeId | None:
    """The node that an address names at its end, or None where it names none."""
    _, found, name = address.rpartition("/p2p/")
    return NodeId(name) if found and is_node_id(name) else None


def grouped_by_node(addresses: Sequence[str]) -> dict[NodeId, tuple[str, ...]]:
    """Addresses by the node they name, in their order; those that name none are left out."""
    groups: dict[NodeId, list[str]] = {}
    for address in addresses:
        node_id = node_of_address(address)
        if node_id is not None:
            groups.setdefault(node_id, []).append(address)
    return {node_id: tuple(group) for node_id, group in groups.items()}


def _is_loopback(address: str) -> bool:
    match = _ADDRESS.match(address)
    if match is None or not match[1].startswith("ip"):
        return match is not None and match[2] == "localhost"
    try:
        return ipaddress.ip_address(match[2]).is_loopback
    except ValueError:
        return False
