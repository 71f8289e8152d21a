"""Drives one node core: what arrives goes in, what it asks is done, and its one timer is kept.

The contract of `kvasir_proto.effects` is held here and nowhere else: what must survive a power cut is saved
before anything of the same drain is sent. While a save fails, what rests on it (`promises.waits_for`) stays:
messages are dropped, for each is best effort and a forgotten vote is not; events wait; it is tried again.
All else goes out, so that a node whose disk is full is alive, and degraded. Notices are logged here, events
are handed to whoever owns the node. It decides nothing about the swarm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import trio

from kvasir_node.backoff import retry_delay_s
from kvasir_node.driver.last_error import LastError
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import ConnectionLost, CoreStreams, Gossip, RecordStore
from kvasir_node.telemetry import get_logger
from kvasir_proto.capability import CapabilityRecord, Verdict
from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Effect, FetchRecord, Notice, Now, Persist, Publish, Send, Slot
from kvasir_proto.errors import ConfigurationInvalid, DiskFull, LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, in_seconds
from kvasir_proto.limits import Rank, as_sentence
from kvasir_proto.membership import events as membership
from kvasir_proto.messages.core import CORE
from kvasir_proto.node_core import NodeCommand, NodeCore, NodeEvent, NodeView
from kvasir_proto.promises import waits_for
from kvasir_proto.term_proof import ProvenTerm

log = get_logger()

FETCHES_MAX: Final = 8
"""Records looked up in the DHT at a time; further ones are hinted at again by gossip."""
FETCH_TIMEOUT_S: Final = 10.0
EVENTS_MAX: Final = 4096
"""Events that may wait for their reader. More means that it hangs, which is a bug."""
WITHHELD_MAX: Final = 256
"""Events that may wait for a save; the oldest goes, since a later one of its kind says what holds now."""
_RETRY_FIRST_S: Final = 1.0
_RETRY_MAX_S: Final = 15.0
_IDLE_S: Final = 3600.0


class CoreDriver:
    """One node core in the world. `run` until cancelled; everything else from the same trio thread."""

    def __init__(
        self,
        core: NodeCore,
        *,
        streams: CoreStreams,
        gossip: Gossip,
        record_store: RecordStore,
        save: Callable[[Slot, bytes], Awaitable[None]],
        clocks: Callable[[], Now],
        last_error: LastError,
    ) -> None:
        """``save`` returns once the bytes would survive a power cut; it raises `DiskFull` or the like."""
        self._core = core
        self._streams = streams
        self._gossip = gossip
        self._record_store = record_store
        self._save = save
        self._clocks = clocks
        self._last_error = last_error
        self._outgoing: deque[Effect | NodeEvent] = deque()
        self._unsaved: dict[Slot, bytes] = {}
        self._unsaved_reason = ""
        self._withheld: deque[Effect | NodeEvent] = deque(maxlen=WITHHELD_MAX)
        self._failures = 0
        self._retry_at = math.inf
        self._wake_timer = trio.Event()
        self._wake_effects = trio.Event()
        self._done = trio.Event()
        self._is_saving = False
        self._fetching: set[str] = set()
        self._events_in, self.events = trio.open_memory_channel[NodeEvent](EVENTS_MAX)

    # -- for duties (`ports.SwarmCore`) ------------------------------------------------------------

    def command(self, request: NodeCommand) -> None:
        """See `ports.SwarmCore`."""
        try:
            self._core.command(request, self._clocks())
        finally:
            self._collect()

    def check_proof(self, proof: bytes, source: NodeId) -> ProvenTerm:
        """See `ports.SwarmCore`."""
        try:
            return self._core.check_proof(proof, source, self._clocks())
        finally:
            self._collect()

    def view(self) -> NodeView:
        """See `ports.SwarmCore`. A node that cannot save is degraded at best."""
        view = self._core.view()
        if self._unsaved_reason and view.state == "ready":
            return replace(view, state="degraded", reason=as_sentence(self._unsaved_reason))
        return view

    @property
    def auditors(self) -> frozenset[NodeId]:
        """See `SwarmCore`."""
        return self._core.auditors

    def verdict_of(self, record: CapabilityRecord, rank: Rank) -> Verdict:
        """See `NodeCore.verdict_of`."""
        return self._core.verdict_of(record, rank)

    def record_of(self, node_id: NodeId) -> CapabilityRecord | None:
        """See `ports.SwarmCore`."""
        return self._core.record_of(node_id)

    @property
    def proof(self) -> bytes:
        """The proof of the term that this node follows, or b""."""
        return self._core.proof

    # -- the driver --------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Wait until everything asked so far has been handed to the network, or cannot be saved."""
        if self._outgoing or self._is_saving:
            await self._done.wait()

    @property
    def has_unsaved(self) -> bool:
        """Whether something that must survive could not be saved so far, and so was not said either."""
        return bool(self._unsaved)

    async def run(self) -> None:
        """Drive the core until cancelled."""
        async with open_unwrapping_nursery() as nursery:
            nursery.start_soon(self._hear_nodes)
            nursery.start_soon(self._hear_gossip)
            nursery.start_soon(self._keep_time)
            await self._do_effects(nursery)

    # -- in ----------------------------------------------------------------------------------------

    async def _hear_nodes(self) -> None:
        while True:
            event = await self._streams.receive()
            if isinstance(event, ConnectionLost):
                self._core.command(membership.ConnectionLost(event.node_id), self._clocks())
            else:
                try:
                    self._core.receive(decode(event.body, CORE), event.sender, self._clocks())
                except RemoteProtocolError as error:
                    log.info("message_refused", node=event.sender, code=error.code, reason=str(error))
            self._collect()

    async def _hear_gossip(self) -> None:
        while True:
            gossiped = await self._gossip.receive()
            try:
                self._core.receive_published(
                    gossiped.topic, gossiped.data, gossiped.forwarder, self._clocks()
                )
            except RemoteProtocolError as error:
                log.info("gossip_refused", node=gossiped.forwarder, code=error.code, reason=str(error))
            self._collect()

    async def _keep_time(self) -> None:
        while True:
            deadline = self._core.next_deadline()
            now = self._clocks()
            wait_s = _IDLE_S if deadline is None else in_seconds(Duration(deadline - now.instant))
            if wait_s <= 0:
                self._core.tick(now)
                self._collect()
                await trio.lowlevel.checkpoint()
                continue
            self._wake_timer = trio.Event()
            with trio.move_on_after(wait_s):
                await self._wake_timer.wait()

    # -- out ---------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take over what the core asks; nothing of it is done here."""
        effects = self._core.drain()
        if effects:
            self._outgoing.extend(effects)
            self._done = trio.Event()
            self._wake_effects.set()
        self._wake_timer.set()

    async def _do_effects(self, nursery: trio.Nursery) -> None:
        while True:
            while not self._outgoing and trio.current_time() < self._retry_at:
                self._wake_effects = trio.Event()
                with trio.move_on_at(self._retry_at):
                    await self._wake_effects.wait()
            effects = list(self._outgoing)
            self._outgoing.clear()
            self._is_saving = True
            await self._save_all({each.slot: each.data for each in effects if isinstance(each, Persist)})
            self._is_saving = False
            effects = [*self._withheld, *effects]
            self._withheld.clear()
            for effect in effects:
                if waits_for(effect).isdisjoint(self._unsaved):
                    self._do(effect, nursery)
                elif not isinstance(effect, Send | Publish):
                    self._withheld.append(effect)
            if not self._outgoing:
                self._done.set()

    async def _save_all(self, fresh: dict[Slot, bytes]) -> None:
        """Save what is new at once, and what could not be saved when it is due again."""
        is_due = trio.current_time() >= self._retry_at
        due = sorted(each for each in {*fresh, *self._unsaved} if is_due or each not in self._unsaved)
        self._unsaved |= fresh
        failure: DiskFull | ConfigurationInvalid | None = None
        for slot in due:
            try:
                await self._save(slot, self._unsaved[slot])
                del self._unsaved[slot]
            except (DiskFull, ConfigurationInvalid) as error:
                failure = error
        if not self._unsaved:
            self._failures, self._retry_at, self._unsaved_reason = 0, math.inf, ""
        elif failure is not None:
            self._note_unsaved(failure)
            if is_due or self._retry_at == math.inf:
                self._failures += 1
                delay_s = retry_delay_s(self._failures, _RETRY_FIRST_S, _RETRY_MAX_S)
                self._retry_at = trio.current_time() + delay_s

    def _note_unsaved(self, error: DiskFull | ConfigurationInvalid) -> None:
        self._unsaved_reason = str(error)
        self._last_error.note(str(error))
        log.error("state_not_saved", reason=str(error), failures=self._failures + 1)

    def _do(self, effect: Effect | NodeEvent, nursery: trio.Nursery) -> None:
        match effect:
            case Persist():
                pass  # saved before
            case Send():
                self._streams.send(effect.to, encode(effect.message))
            case Publish():
                self._publish(effect, nursery)
            case FetchRecord():
                if len(self._fetching) < FETCHES_MAX and effect.node_id not in self._fetching:
                    self._fetching.add(effect.node_id)
                    nursery.start_soon(self._fetch, effect)
            case Notice():
                log.info(effect.event, **dict(effect.fields))
            case _:
                self._events_in.send_nowait(effect)

    def _publish(self, effect: Publish, nursery: trio.Nursery) -> None:
        try:
            self._gossip.publish(effect.topic, effect.data)
        except LocalProtocolError as error:
            log.error("publication_refused", topic=effect.topic, reason=str(error))
            return
        if effect.topic == "records":
            nursery.start_soon(self._store, effect.data)

    async def _store(self, data: bytes) -> None:
        try:
            await self._record_store.put(data)
        except LocalProtocolError as error:
            log.info("record_not_stored", reason=str(error))

    async def _fetch(self, effect: FetchRecord) -> None:
        try:
            data = await self._record_store.get(effect.node_id, FETCH_TIMEOUT_S)
        finally:
            self._fetching.discard(effect.node_id)
        if data is None:
            return
        try:
            self._core.receive_record(data, self._clocks())
        except RemoteProtocolError as error:
            log.info("record_refused", node=effect.node_id, code=error.code, reason=str(error))
        self._collect()
