"""Records in libp2p's DHT, so that what it gets wrong stays here.

libp2p 0.8.1's Kademlia takes any public node for one of ours (its protocol's name is fixed), answers from its
own copy for a day without looking whether that is still valid, lets one caller that says nothing hold every
place it serves callers at, dials whatever a stranger names and republishes after 22 hours. So it is given a
host of our own making: with our protocol's name, an address book apart from the host's, and dials through
`Dialler`. Who may say what, and which of two records is newer, it asks `JudgeRecord`.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog
import trio
from libp2p.kad_dht import common, kad_dht, peer_routing, value_store
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.records.validator import NamespacedValidator, Validator

from kvasir_node.net.buffered_stream import BufferedStream
from kvasir_node.net.dialler import Dialler
from kvasir_node.net.host import Libp2pHost, libp2p_id_of
from kvasir_node.ports import Claim, JudgeRecord
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, is_node_id

NAMESPACE: Final = "kvasir"
_QUERY_TIMEOUT_S: Final = 3
_STORED_MAX: Final = 8192
_STREAMS_MAX: Final = 64
_ADDRESS_LIFE_S: Final = 7200
_MEET_ROUNDS_MAX: Final = 64

log = structlog.get_logger(__name__)

# One node that was stopped, not ended, would hold up each lookup for ten seconds.
for _module in (kad_dht, peer_routing):
    _module.QUERY_TIMEOUT = _QUERY_TIMEOUT_S
value_store.MAX_VALUE_STORE_SIZE = _STORED_MAX
# It warns of each stream that a node ended without an answer, which is how it says no.
logging.getLogger("libp2p.kad_dht").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class RecordStoreOptions:
    """How much is kept for others, and how often anything happens unasked."""

    record_size_max: int = 64 << 10
    """Bytes of one record."""
    message_size_max: int = 256 << 10
    """Bytes of one message of the DHT: a record and twenty nodes with their signed addresses."""
    stream_timeout_s: float = 5.0
    """A stream to us is served this long in all. A request and its answer take 10 ms."""
    streams_per_node_max: int = 3
    """Streams of one node served at a time."""
    put_timeout_s: float = 10.0
    refresh_interval_s: float = 300.0
    """How often our own surroundings are looked up. One lookup asks up to 20 nodes, about 10 ms of CPU each;
    too seldom, and after much coming and going records are stored and looked for at different nodes.
    """
    meet_interval_s: float = 15.0
    """How often connected nodes that are not in the table of neighbours are asked again: some begin later. A
    node that does not answer is asked half as often each time.
    """
    republish_interval_s: float = 600.0
    """How often our newest record is stored again. Those that have it refuse it, cheaply; those that came
    since store it.
    """


def key_of(node_id: NodeId) -> str:
    """The DHT's key for a node's record: 40 bytes. Nodes refuse keys over 50, and a node id does not fit."""
    digest = hashlib.sha256(node_id.encode()).digest()
    return f"/{NAMESPACE}/{base64.b32encode(digest)[:32].decode().lower()}"


class DhtRecordStore:
    """See `ports.RecordStore`. Made once for a host, which must be running; serves others from then on."""

    def __init__(
        self,
        host: Libp2pHost,
        dialler: Dialler,
        swarm: SwarmDigest,
        judge: JudgeRecord,
        options: RecordStoreOptions | None = None,
    ) -> None:
        self._host = host
        self._judge = judge
        self._options = RecordStoreOptions() if options is None else options
        kad_dht.MAX_DHT_MESSAGE_SIZE = self._options.message_size_max
        peer_routing.MAX_DHT_MESSAGE_SIZE = self._options.message_size_max
        value_store.MAX_DHT_MESSAGE_SIZE = self._options.message_size_max
        rule = _RecordRule(judge, self._options.record_size_max)
        # A swarm has a DHT of its own: nodes of another speak another protocol.
        protocol = f"/{NAMESPACE}/{swarm.hex()[:16]}/kad/1"
        self._dht = _Dht(
            _HostForDht(host, dialler, protocol, self._options),
            NamespacedValidator({NAMESPACE: rule}, strict_validation=True),
            self._options,
        )
        self._own: dict[str, bytes] = {}
        self._random = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._joined = trio.Event()

    async def put(self, data: bytes) -> None:
        """See `ports.RecordStore`."""
        claim = self._judge(data)
        if claim is None or len(data) > self._options.record_size_max:
            raise LocalProtocolError("this is no valid record of this swarm, or it is too large")
        key = key_of(claim.node_id)
        self._check_newer(key, claim)
        self._own = {key: data}
        await self._store(key, data)

    async def get(self, node_id: NodeId, timeout_s: float) -> bytes | None:
        """See `ports.RecordStore`."""
        key = key_of(node_id)
        entries: dict[bytes, Any] = self._dht.value_store.store
        # libp2p would answer with our own copy and ask nobody. So that is put aside while others are asked.
        kept = entries.pop(key.encode(), None)
        try:
            with trio.move_on_after(timeout_s):
                await self._dht.get_value(key)
        except Exception as error:  # whatever libp2p did not expect to be told
            log.warning("record_lookup_failed", node=node_id, reason=f"{type(error).__name__}: {error}")
        finally:
            if kept is not None:
                claim = self._claim_of(entries.get(key.encode()))
                kept_claim = self._claim_of(kept)
                if kept_claim is not None and (claim is None or claim.order < kept_claim.order):
                    entries[key.encode()] = kept
        return self._valid_copy(key)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep the table of neighbours and the stored records fresh until cancelled. Started once."""
        async with trio.open_nursery() as nursery:
            self._host.watch_connections(lambda node_id, up: self._meet(nursery, node_id) if up else None)
            nursery.start_soon(self._meet_those_missed)
            nursery.start_soon(self._refresh)
            nursery.start_soon(self._republish)
            task_status.started()
            await trio.sleep_forever()

    def neighbours(self) -> int:
        """Nodes in the table of neighbours."""
        return int(self._dht.routing_table.size())

    def stored(self) -> int:
        """Records kept here."""
        return len(self._dht.value_store.store)

    def _check_newer(self, key: str, claim: Claim) -> None:
        stored = self._claim_of(self._dht.value_store.store.get(key.encode()))
        if stored is not None and stored.order > claim.order:
            raise LocalProtocolError(f"a newer record of node {claim.node_id} is stored already")

    async def _store(self, key: str, data: bytes) -> None:
        with trio.move_on_after(self._options.put_timeout_s):
            try:
                await self._dht.put_value(key, data)
            except ValueError as error:  # somebody stored a newer one while we asked
                log.info("record_not_stored", reason=str(error))

    def _claim_of(self, entry: Any) -> Claim | None:
        return None if entry is None else self._judge(bytes(entry[0].value))

    def _valid_copy(self, key: str) -> bytes | None:
        entry = self._dht.value_store.store.get(key.encode())
        return bytes(entry[0].value) if self._claim_of(entry) is not None else None

    def _meet(self, nursery: trio.Nursery, node_id: NodeId) -> None:
        """Have a connected node in the table. One of two asks; the other learns of it by being asked."""
        if node_id > self._host.node_id:
            nursery.start_soon(self._dht.meet, libp2p_id_of(node_id))
        if not self._joined.is_set():
            self._joined.set()

    async def _meet_those_missed(self) -> None:
        waits: dict[NodeId, int] = {}
        for round_number in itertools.count():
            missed = [each for each in self._host.connected_nodes() if not self._dht.has_met(each)]
            waits = {each: waits.get(each, 1) for each in missed}
            for node_id in missed:
                if round_number % waits[node_id] == 0:
                    await self._dht.meet(libp2p_id_of(node_id))
                    waits[node_id] = min(2 * waits[node_id], _MEET_ROUNDS_MAX)
            await trio.sleep(self._options.meet_interval_s * self._random.uniform(0.8, 1.2))

    async def _refresh(self) -> None:
        await self._joined.wait()
        await trio.sleep(5.0)
        while True:
            try:
                await self._dht.peer_routing.find_closest_peers_network(self._dht.local_peer_id.to_bytes())
                self._drop_expired()
            except Exception as error:  # whatever libp2p did not expect to be told
                log.warning("record_store_refresh_failed", reason=f"{type(error).__name__}: {error}")
            await trio.sleep(self._options.refresh_interval_s * self._random.uniform(0.8, 1.2))

    async def _republish(self) -> None:
        while True:
            await trio.sleep(self._options.republish_interval_s * self._random.uniform(0.8, 1.2))
            for key, data in list(self._own.items()):
                if self._judge(data) is None:
                    self._own.pop(key, None)  # it expired, and there is no newer one
                    continue
                await self._store(key, data)

    def _drop_expired(self) -> None:
        entries = self._dht.value_store.store
        for key in [key for key, entry in entries.items() if self._claim_of(entry) is None]:
            del entries[key]


class _RecordRule(Validator):
    """What libp2p asks before it stores, hands on or prefers a record."""

    def __init__(self, judge: JudgeRecord, size_max: int) -> None:
        self._judge = judge
        self._size_max = size_max

    def validate(self, key: str, value: bytes) -> None:
        """Raises `ValueError` for what is no valid record of the node with this key."""
        claim = self._judge(bytes(value)) if len(value) <= self._size_max else None
        if claim is None or key_of(claim.node_id) != key:
            raise ValueError("no valid record of the node with this key")

    def select(self, _key: str, values: Sequence[bytes]) -> int:
        """The index of the newest; of equals the first."""
        orders = []
        for value in values:
            claim = self._judge(bytes(value))
            orders.append(-1 if claim is None else claim.order)
        return orders.index(max(orders))


class _AddressBook(PeerStore):
    """libp2p's address book, apart from the host's own: strangers write in this one."""

    def consume_peer_record(self, envelope: Any, ttl: int) -> bool:
        """Take a node's signed addresses; an older one is left out, and no reason to break off a talk.

        libp2p breaks it off, and numbers these records by the wall clock: a node whose clock was set back
        would be shut out until its old record is forgotten.
        """
        super().consume_peer_record(envelope, min(ttl, _ADDRESS_LIFE_S))
        return True


class _HostForDht:
    """The host as the DHT sees it."""

    def __init__(
        self, host: Libp2pHost, dialler: Dialler, protocol: str, options: RecordStoreOptions
    ) -> None:
        self._host = host
        self._dialler = dialler
        self._protocol = protocol
        self._options = options
        self._book = _AddressBook()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host.libp2p, name)

    def get_peerstore(self) -> PeerStore:
        return self._book

    def get_connected_peers(self) -> list[ID]:
        return [libp2p_id_of(each) for each in self._host.connected_nodes()]

    def set_stream_handler(self, _protocol: str, handler: Any) -> None:
        self._host.libp2p.set_stream_handler(self._protocol, handler)

    async def new_stream(self, libp2p_id: ID, protocols: Sequence[str]) -> Any:
        node_id = NodeId(str(libp2p_id))
        if not is_node_id(node_id):
            raise ValueError("not a node of ours")
        if not self._host.is_connected(node_id):
            heard = (str(each) for each in self._book.addrs(libp2p_id))
            self._dialler.learn(node_id, heard, "heard")
            await self._dialler.reach(node_id)
        if list(protocols) != [common.PROTOCOL_ID]:  # a ping
            return await self._host.libp2p.new_stream(libp2p_id, protocols)
        stream = await self._host.libp2p.new_stream(libp2p_id, [self._protocol])
        return BufferedStream(stream, end_is_empty=True)


class _NoProviders:
    """Stands where libp2p keeps who provides what. We do not use it, and strangers could fill it."""

    def add_provider(self, _key: bytes, _provider: object) -> None:
        """Nothing is kept."""

    def get_providers(self, _key: bytes) -> list[Any]:
        """Nobody provides anything."""
        return []


class _Dht(KadDHT):
    def __init__(
        self, host: _HostForDht, validator: NamespacedValidator, options: RecordStoreOptions
    ) -> None:
        self._streams_of: Counter[str] = Counter()
        self._options = options
        super().__init__(
            host,
            DHTMode.SERVER,
            validator=validator,
            validator_changed=True,
            strict_validation=True,
            # Members of one swarm may well be in one machine room.
            max_peers_per_subnet=0,
        )
        self._inbound_limiter = trio.CapacityLimiter(_STREAMS_MAX)
        self.provider_store = _NoProviders()

    async def handle_stream(self, stream: Any) -> None:
        """Serve one stream: a few of each node at a time, and none for long."""
        caller = str(stream.muxed_conn.peer_id)
        if self._streams_of[caller] >= self._options.streams_per_node_max:
            await stream.reset()
            return
        self._streams_of[caller] += 1
        try:
            with trio.move_on_after(self._options.stream_timeout_s) as patience:
                await super().handle_stream(BufferedStream(stream, end_is_empty=True))
            if patience.cancelled_caught:
                await stream.reset()
            else:
                # Its addresses came with what it said, after libp2p looked for them.
                await self.add_peer(stream.muxed_conn.peer_id, skip_server_mode_check=True)
        finally:
            self._streams_of[caller] -= 1
            if not self._streams_of[caller]:
                del self._streams_of[caller]

    def has_met(self, node_id: NodeId) -> bool:
        """Whether that node is in the table of neighbours."""
        return bool(self.routing_table.peer_in_table(libp2p_id_of(node_id)))

    async def meet(self, libp2p_id: ID) -> None:
        """Ask a connected node who is near us: it tells its addresses, and hears ours."""
        try:
            await self.peer_routing._query_peer_for_closest(libp2p_id, self.local_peer_id.to_bytes())
            await self.add_peer(libp2p_id)
        except Exception as error:  # whatever libp2p did not expect to be told
            log.debug("node_not_met", node=str(libp2p_id), reason=f"{type(error).__name__}: {error}")
