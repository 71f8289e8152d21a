"""Members of our swarm on the same LAN, by multicast DNS.

Announces this node's real addresses and the beginning of its swarm's digest, and reports the nodes that
announce the same swarm; those of another are left out. libp2p's own announces wildcards, believes everybody
and dials them. An announcement proves nothing: whoever is dialled must prove its key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from typing import Final

import structlog
import trio
from zeroconf import InterfaceChoice, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from kvasir_node.net.dialler import address_of
from kvasir_node.system_words import in_words
from kvasir_proto.ids import NodeId, SwarmDigest, is_node_id

SERVICE: Final = "_kvasir._tcp.local."
_ADDRESSES_MAX: Final = 8
_ANSWER_TIMEOUT_MS: Final = 2000
_RETRY_S: Final = 60.0

log = structlog.get_logger(__name__)

FoundOnLan = Callable[[NodeId, tuple[str, ...]], None]


class LanDiscovery:
    """Announces one node and listens for the others of its swarm; see the module."""

    def __init__(
        self,
        node_id: NodeId,
        swarm: SwarmDigest,
        addresses: Sequence[str],
        *,
        interfaces: Sequence[str] | None = None,
    ) -> None:
        """`interfaces` are IP addresses of this machine to speak at; None is those that `addresses` name."""
        self._node_id = node_id
        self._swarm = swarm.hex()[:16]
        self._addresses = [each.removesuffix(f"/p2p/{node_id}") for each in addresses][:_ADDRESSES_MAX]
        hosts = [each.split("/")[2] for each in self._addresses if each.startswith(("/ip4/", "/ip6/"))]
        self._interfaces = list(hosts if interfaces is None else interfaces)

    async def run(self, found: FoundOnLan) -> None:
        """Announce and report until cancelled; a LAN that cannot be used is tried again now and then."""
        while True:
            try:
                await self._run_once(found)
            except OSError as error:
                log.warning("lan_unavailable", reason=in_words(error), retry_s=_RETRY_S)
            await trio.sleep(_RETRY_S)

    async def _run_once(self, found: FoundOnLan) -> None:
        token = trio.lowlevel.current_trio_token()

        def report(node_id: NodeId, addresses: tuple[str, ...]) -> None:
            try:
                token.run_sync_soon(found, node_id, addresses)
            except trio.RunFinishedError:
                return  # the program ended while an answer came

        def changed(
            zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
        ) -> None:
            if state_change is not ServiceStateChange.Removed and name != own.name:
                info = zeroconf.get_service_info(service_type, name, timeout=_ANSWER_TIMEOUT_MS)
                member = None if info is None else member_of(info, self._swarm)
                if member is not None and member[0] != self._node_id:
                    report(*member)

        own = self._service()
        interfaces = self._interfaces or InterfaceChoice.Default
        zeroconf = await trio.to_thread.run_sync(lambda: Zeroconf(interfaces=interfaces))
        try:
            await trio.to_thread.run_sync(zeroconf.register_service, own, abandon_on_cancel=False)
            browser = ServiceBrowser(zeroconf, SERVICE, handlers=[changed])
            log.info("lan_announced", addresses=self._addresses)
            try:
                await trio.sleep_forever()
            finally:
                browser.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(zeroconf.close)

    def _service(self) -> ServiceInfo:
        fields = {"swarm": self._swarm, "node": self._node_id}
        fields.update({f"a{index}": address for index, address in enumerate(self._addresses)})
        port = next((int(each.split("/")[4]) for each in self._addresses), 0)
        return ServiceInfo(
            SERVICE,
            f"{self._node_id}.{SERVICE}",
            port=port,
            properties=fields,
            server=f"{self._node_id}.local.",
            addresses=[ipaddress.ip_address(each).packed for each in self._interfaces],
        )


def member_of(info: ServiceInfo, swarm: str) -> tuple[NodeId, tuple[str, ...]] | None:
    """The node and addresses an announcement names, or None for another swarm's, or what is none at all."""
    texts = {
        key.decode("ascii", "replace"): value.decode("ascii", "replace")
        for key, value in info.properties.items()
        if value is not None
    }
    node_id = texts.get("node", "")
    if texts.get("swarm") != swarm or not is_node_id(node_id):
        return None
    named = (texts.get(f"a{index}", "") for index in range(_ADDRESSES_MAX))
    whole = (address_of(NodeId(node_id), each) for each in named)
    addresses = tuple(each for each in whole if each is not None)
    return (NodeId(node_id), addresses) if addresses else None
