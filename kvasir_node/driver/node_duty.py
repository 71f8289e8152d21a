"""A node's life in a swarm: enter it, drive its core, hold experts, and be backbone when it is elected.

Owns the order of things: the swarm's manifest first, then its model, then network and core, then the two
duties, which see what the core tells and ask it back through `ports.SwarmCore`. It answers whoever opens a
control stream: who we are (`Hello`), and the way to our engine (`DataRequest`). What is decided about the
swarm is decided in the core; what an engine does is the duties' affair.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node import __version__
from kvasir_node.backoff import retry_delay_s
from kvasir_node.driver.auditor_duty import AuditorDuty
from kvasir_node.driver.backbone_duty import BackboneDuty, BackboneSettings
from kvasir_node.driver.completions import SwarmCompletions
from kvasir_node.driver.conversation import ask, hear, refuse, tell
from kvasir_node.driver.core_driver import CoreDriver
from kvasir_node.driver.expert_asking import ExpertAsker, givers_of
from kvasir_node.driver.expert_giving import STREAMS_PER_MEMBER_MAX, ExpertGiver
from kvasir_node.driver.holder_duty import HolderDuty, HolderSettings
from kvasir_node.driver.kernel_certifier import KernelCertifier, MeasurementStore
from kvasir_node.driver.last_error import LastError
from kvasir_node.driver.manifest_exchange import ManifestPieces, fetch_addresses, fetch_manifest
from kvasir_node.driver.session_server import SESSIONS_PER_NODE_MAX, SessionServer
from kvasir_node.driver.status_report import StatusSources
from kvasir_node.kernel_in_use import KernelInUse
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import (
    EXPERTS_PROTOCOL,
    SESSION_PROTOCOL,
    ControlStream,
    EngineStarter,
    ExpertKeeper,
    ExpertMembers,
    ExpertsHere,
    Host,
    NetworkStarter,
    SwarmNetwork,
)
from kvasir_node.swarm_files import KnownSwarm
from kvasir_node.telemetry import get_logger
from kvasir_proto import PROTOCOL_VERSION
from kvasir_proto.admission import AdmissionFailed, Invite, InviteIssued, IssueInvite, Revoke, UseInvite
from kvasir_proto.capability import CapabilityRecord, RankVerdict
from kvasir_proto.effects import Now, Slot, SlotDamaged
from kvasir_proto.election.requests import Recover
from kvasir_proto.errors import (
    ConfigurationInvalid,
    KvasirError,
    LocalProtocolError,
    ModelUnusable,
    NotReady,
    RemoteProtocolError,
    TransportUnavailable,
)
from kvasir_proto.ids import NodeId, SwarmDigest
from kvasir_proto.instants import Instant, WallTime, in_seconds
from kvasir_proto.limits import Rank
from kvasir_proto.manifest import ModelManifest
from kvasir_proto.measured_kernel import MeasuredKernel
from kvasir_proto.membership.events import ClockSuspected, Leave, MemberChanged, Seed
from kvasir_proto.messages.engine import TrunkLoaded
from kvasir_proto.messages.swarm import DataRequest, Hello, ManifestRequest, SourceRequest, Welcome
from kvasir_proto.node_core import CoreOptions, Describe, NodeCore, NodeEvent
from kvasir_proto.placement.inventory import ModelShape
from kvasir_proto.records import RecordChanged
from kvasir_proto.swarm_manifest import FoundedSwarm, open_swarm_manifest
from kvasir_proto.tolerance_certificate import issue_certificate, sign_certificate

if TYPE_CHECKING:
    import random

log = get_logger()

ENTER_DELAY_FIRST_S: Final = 0.5
ENTER_DELAY_MAX_S: Final = 15.0
MODEL_DELAY_MAX_S: Final = 30.0
LEAVE_TIMEOUT_S: Final = 2.0
"""How long a node that stops waits for others to have been told."""
_INVITE_TIMEOUT_S: Final = 10.0
_BACKBONE: Final[frozenset[Rank]] = frozenset({"backbone"})


TakeManifest: TypeAlias = Callable[[ModelManifest, Sequence[str]], Awaitable[None]]
"""See `NodeDuty`."""


class HomeFiles(Protocol):
    """What a node remembers of its swarm; `SwarmFiles` is it. Calls raise `DiskFull` and the like."""

    def load_swarm(self) -> KnownSwarm | None:
        """The swarm of this home."""

    def save_swarm(self, signed_manifest: bytes) -> None:
        """Remember the swarm that was entered."""

    def load_invite(self) -> Invite | None:
        """The invite that was given to this home."""

    def claim_slots(self, swarm: SwarmDigest, node_id: NodeId) -> None:
        """Have the slots belong to this node in this swarm; raises where they are another's."""

    def load_slots(self) -> dict[Slot, bytes]:
        """What the core persisted."""

    def slot_damaged(self, slot: Slot, reason: str) -> KvasirError:
        """The error, with the name of the file, for a slot that a core refuses for ``reason``."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the configuration says of a node's part in a swarm.

    ``ranks`` are those it stands for, as far as its kernels are fit for them; ``kernels`` are those it
    computes with, the holder's first.
    """

    bootstrap: tuple[str, ...]
    core: CoreOptions
    ranks: tuple[Rank, ...]
    nominees: tuple[NodeId, ...]
    memory_bytes: int
    kernels: tuple[KernelInUse, ...]
    holder: HolderSettings
    backbone: BackboneSettings
    give_bytes_per_second: int = 0
    """Bytes of experts that all other members together are given in a second; 0 gives none."""
    tell_addresses: bool = False
    """Whether whoever asks is told the address that the model came from."""
    follow_addresses: bool = False
    """Whether the model is looked for at addresses that members tell."""


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """The swarm's model as this home has it. ``has_experts``: their bytes can be read here."""

    stored: StoredModel
    has_experts: bool


class NodeDuty:
    """This node in its swarm. `run` until cancelled; `leave` before that to go in good order."""

    def __init__(
        self,
        *,
        node_key: Ed25519PrivateKey,
        files: HomeFiles,
        save_slot: Callable[[Slot, bytes], Awaitable[None]],
        host: Host,
        start_network: NetworkStarter,
        find_model: Callable[[bytes], Awaitable[ModelOnDisk]],
        find_backbone_file: Callable[[StoredModel], Awaitable[Path]],
        start_engine: Callable[[SwarmDigest], EngineStarter],
        next_generation: Callable[[], int],
        measurements: MeasurementStore,
        is_held_back: Callable[[], bool | None],
        settings: NodeSettings,
        entropy: random.Random,
        now: Callable[[], Instant],
        wall_time: Callable[[], WallTime],
        keep_experts: Callable[[StoredModel, ExpertMembers], ExpertKeeper] | None = None,
        experts_here: Callable[[StoredModel], ExpertsHere] | None = None,
        take_manifest: TakeManifest | None = None,
    ) -> None:
        """``keep_experts`` makes a keeper for one duty; None: the model's file is here. ``experts_here`` is
        what others may have of the model; None: nothing.

        ``take_manifest`` takes the swarm's model in by its manifest, which others gave, and by addresses that
        they told where the settings allow it, so that
        ``find_model`` finds it; None where this home has no address to fetch it from.

        ``find_model`` raises `ModelUnusable`; ``find_backbone_file`` gives a verified file, if slowly.
        ``is_held_back`` says whether this machine slows its processors down.
        """
        self._node_key = node_key
        self._files = files
        self._save_slot = save_slot
        self._host = host
        self._start_network = start_network
        self._find_model = find_model
        self._find_backbone_file = find_backbone_file
        self._start_engine = start_engine
        self._next_generation = next_generation
        self._measurements = measurements
        self._is_held_back = is_held_back
        self._settings = settings
        self._entropy = entropy
        self._now = now
        self._wall_time = wall_time
        self._keep_experts = keep_experts
        self._experts_here = experts_here
        self._asker: ExpertAsker | None = None
        self._take_manifest = take_manifest
        self._pieces: ManifestPieces | None = None
        self._last_error = LastError(wall_time)
        self._known = files.load_swarm()
        self._contact = "looking for the swarm"
        self._model: ModelOnDisk | None = None
        self._has_model = trio.Event()
        self._said: CapabilityRecord | None = None
        self._certifier: KernelCertifier | None = None
        self._has_served = False
        """Whether its worker engine has been ready once."""
        self._core: CoreDriver | None = None
        self._network: SwarmNetwork | None = None
        self._holder: HolderDuty | None = None
        self._backbone: BackboneDuty | None = None
        self._auditor: AuditorDuty | None = None
        self._completions: SwarmCompletions | None = None
        self._signed_certificate = b""
        self._invites: dict[bytes, trio.MemorySendChannel[Invite]] = {}

    # -- life --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Enter the swarm and take part in it, until cancelled."""
        known = self._known or await self._enter()
        self._known = known
        self._model = await self._wait_for_model(known.swarm)
        self._has_model.set()
        told = self._model.stored.addresses if self._settings.tell_addresses else ()
        self._pieces = ManifestPieces(self._model.stored.manifest, told)
        self._files.claim_slots(known.swarm.digest, self._host.node_id)
        self._certifier = await self._make_certifier(self._model)
        clocks = self._clocks()
        self._said = self._capability()
        try:
            core = NodeCore(
                private_key=self._node_key,
                swarm=known.swarm,
                capability=self._said,
                model=ModelShape.of(self._model.stored.manifest),
                options=self._settings.core,
                stored=self._files.load_slots(),
                entropy=self._entropy,
                now=clocks,
                anchor=self._anchor(known.swarm),
                nominees=self._settings.nominees,
            )
        except SlotDamaged as error:
            raise self._files.slot_damaged(error.slot, error.reason) from error
        async with open_unwrapping_nursery() as nursery:
            network = await self._start_network(nursery, known.swarm.digest)
            self._network = network
            driver = CoreDriver(
                core,
                streams=network.streams,
                gossip=network.gossip,
                record_store=network.record_store,
                save=self._save_slot,
                clocks=self._clocks,
                last_error=self._last_error,
            )
            self._core = driver
            self._exchange_experts(self._model.stored, driver, network)
            self._make_duties(known.swarm, self._model.stored, driver, self._certifier)
            assert self._holder is not None
            assert self._backbone is not None
            assert self._auditor is not None
            nursery.start_soon(driver.run)
            nursery.start_soon(self._hear_events, driver)
            nursery.start_soon(self._keep_seeded, driver, network)
            if self._model.has_experts:
                nursery.start_soon(self._holder.run)
                nursery.start_soon(self._auditor.run)
            if "backbone" in self._settings.ranks:
                nursery.start_soon(self._backbone.run)
            invite = self._files.load_invite()
            if invite is not None and not core.is_admitted:
                driver.command(UseInvite(invite))
            await trio.sleep_forever()

    async def _make_certifier(self, model: ModelOnDisk) -> KernelCertifier:
        """What measures this node's kernels, with all that is known of them from before."""
        certifier = KernelCertifier(
            # Without experts nothing is computed with them here, neither as holder nor as backbone.
            kernels=self._settings.kernels if model.has_experts else (),
            n_threads=self._settings.holder.n_threads,
            model=model.stored,
            store=self._measurements,
            wall_time=self._wall_time,
            is_held_back=self._is_held_back,
            note_certified=self._note_certified,
        )
        await certifier.recall()
        return certifier

    def _make_duties(
        self, swarm: FoundedSwarm, model: StoredModel, core: CoreDriver, certifier: KernelCertifier
    ) -> None:
        start_engine = self._start_engine(swarm.digest)
        self._holder = HolderDuty(
            swarm=swarm,
            model=model,
            core=core,
            host=self._host,
            start_engine=start_engine,
            next_generation=self._next_generation,
            settings=self._settings.holder,
            certifier=certifier,
            certificate=lambda: self._signed_certificate,
            note_speed=self._note_speed,
            now=self._now,
            wall_time=self._wall_time,
            experts=self._keeper(model),
        )
        self._auditor = AuditorDuty(
            swarm=swarm,
            model=model,
            core=core,
            host=self._host,
            holder=self._holder,
            entropy=self._entropy,
            wall_time=self._wall_time,
            experts=self._keeper(model),
        )
        self._backbone = BackboneDuty(
            node_key=self._node_key,
            swarm=swarm,
            model=model,
            find_backbone_file=lambda: self._find_backbone_file(model),
            core=core,
            host=self._host,
            start_engine=start_engine,
            next_generation=self._next_generation,
            settings=self._settings.backbone,
            note_trunk=self._note_trunk,
            now=self._now,
            wall_time=self._wall_time,
            experts=self._keeper(model),
            audited=self._keeper(model),
        )
        sessions = SessionServer(node_id=self._host.node_id, core=core, runner=self._backbone)
        self._host.set_stream_handler(
            sessions.serve_stream, SESSION_PROTOCOL, streams_per_node_max=SESSIONS_PER_NODE_MAX
        )
        self._completions = SwarmCompletions(
            node_id=self._host.node_id,
            term=core.view().fence,
            open_stream=self._open_session_stream,
            serve=sessions.serve,
            now=self._now,
        )

    async def _open_session_stream(self, node_id: NodeId) -> ControlStream:
        assert self._network is not None
        await self._network.reach(node_id)
        return await self._host.open_stream(node_id, SESSION_PROTOCOL)

    def _exchange_experts(self, model: StoredModel, core: CoreDriver, network: SwarmNetwork) -> None:
        """Ask other members for experts from now on, and give them what is here."""
        digest = model.manifest.digest()
        own = self._host.node_id
        self._asker = ExpertAsker(digest, self._host, network.reach, lambda: givers_of(core, own), self._now)
        if self._experts_here is not None:
            giver = ExpertGiver(
                digest,
                self._experts_here(model),
                lambda node_id: core.record_of(node_id) is not None,
                self._settings.give_bytes_per_second,
                self._now,
            )
            self._host.set_stream_handler(
                giver.serve_stream, EXPERTS_PROTOCOL, streams_per_node_max=STREAMS_PER_MEMBER_MAX + 1
            )

    def _keeper(self, model: StoredModel) -> ExpertKeeper | None:
        assert self._asker is not None
        return None if self._keep_experts is None else self._keep_experts(model, self._asker)

    async def _wait_for_model(self, swarm: FoundedSwarm) -> ModelOnDisk:
        """The swarm's model; says what is missing until it is here."""
        failures = 0
        while True:
            try:
                return await self._find_model(swarm.manifest.model_digest)
            except ModelUnusable as error:
                reason = str(error)
            if self._take_manifest is not None:
                try:
                    self._contact = "fetching the model's manifest and its backbone part"
                    await self._take_manifest(*await self._manifest_of_others(swarm, failures))
                    continue
                except (KvasirError, RemoteProtocolError) as error:
                    reason = str(error)
            failures += 1
            self._contact = reason
            self._last_error.note(reason)
            log.error("model_missing", reason=reason)
            await trio.sleep(retry_delay_s(failures, ENTER_DELAY_FIRST_S, MODEL_DELAY_MAX_S))

    async def _manifest_of_others(
        self, swarm: FoundedSwarm, failures: int
    ) -> tuple[ModelManifest, tuple[str, ...]]:
        """The model's manifest and where the model is, from the first at a known address who gives it.

        After each failure another one is asked first: what the last one gave may have been worth nothing.
        """
        reason = "no address of a member is known"
        addresses = self._addresses_to_enter_by()
        turn = failures % max(1, len(addresses))
        for address in addresses[turn:] + addresses[:turn]:
            try:
                node_id = await self._host.connect(address)
                stream = await self._host.open_stream(node_id)
                try:
                    digest = swarm.manifest.model_digest
                    manifest = await fetch_manifest(stream, digest)
                    follow = self._settings.follow_addresses
                    return manifest, await fetch_addresses(stream, digest) if follow else ()
                finally:
                    await stream.close()
            except (KvasirError, RemoteProtocolError) as error:
                reason = f"{address}: {error}"
                log.warning("manifest_not_given", address=address, reason=str(error))
        raise TransportUnavailable(f"nobody gives the model's manifest: {reason}")

    def _clocks(self) -> Now:
        return Now(self._now(), self._wall_time())

    def _anchor(self, swarm: FoundedSwarm) -> bytes | None:
        invite = self._files.load_invite()
        return invite.electorate_digest if invite is not None and invite.swarm == swarm.digest else None

    def _capability(self) -> CapabilityRecord:
        """What this node says of itself at first; the core numbers it and fills in what it holds."""
        settings = self._settings
        return CapabilityRecord(
            node_id=self._host.node_id,
            sequence=0,
            expires=0,
            addresses=self._host.addresses(),
            versions=(PROTOCOL_VERSION,),
            node_version=__version__,
            memory_bytes=settings.memory_bytes,
            state="joined",
            reason="",
            started=self._wall_time(),
            stands_for_elector="backbone" in settings.ranks,
            has_backbone_file="backbone" in settings.ranks,
            headroom_bytes=settings.memory_bytes,
            **self._arithmetic(),
        )

    def _arithmetic(self) -> dict[str, Any]:
        """What this node may say of its kernels, and the ranks that it stands for with them.

        It stands for nothing before they are measured, and never for what that shows them to be unfit for. It
        stands for experts once its engine is there and has said how fast it is: a plan that took it for as
        fast as others in the meantime would have to be taken back.
        """
        assert self._certifier is not None
        kernel, measured = self._settings.kernels[0], self._certifier.measured
        wanted = self._settings.ranks if self._has_served else tuple(_BACKBONE & {*self._settings.ranks})
        ranks: tuple[Rank, ...] = ()
        verdicts: tuple[RankVerdict, ...] = ()
        if measured is not None:
            ranks = tuple(rank for rank in wanted if rank not in measured.unfit)
            digest = self._certify(measured, self._certifier.measured_at)
            verdicts = tuple(RankVerdict(rank, "claimed", digest) for rank in ranks if rank in measured.fit)
        elif not self._certifier.has_kernels:
            ranks = wanted
        return {
            "backend": kernel.kernel if measured is None else measured.backend,
            "device": kernel.device,
            "accumulation": "UNKNOWN" if measured is None else measured.accumulation,
            "classes": () if measured is None or measured.not_probed else measured.kernel_classes,
            "ranks": ranks,
            "verdicts": verdicts,
        }

    def _certify(self, measured: MeasuredKernel, measured_at: int) -> bytes:
        """Sign what was measured, for auditors; the certificate's digest."""
        assert self._known is not None
        certificate = issue_certificate(measured, self._node_key, measured_at)
        self._signed_certificate = sign_certificate(certificate, self._node_key, self._known.swarm.digest)
        return certificate.digest()

    def _note_certified(self) -> None:
        """Its kernels have been measured."""
        self._describe(**self._arithmetic())

    def _note_speed(self, expert_row_ns: int) -> None:
        """Its worker engine is there and has measured itself."""
        self._has_served = True
        self._describe(expert_row_ns=expert_row_ns, **self._arithmetic())

    def _note_trunk(self, trunk: TrunkLoaded) -> None:
        """Its backbone engine has loaded the trunk."""
        headroom_bytes = max(0, self._settings.memory_bytes - trunk.memory_bytes)
        self._describe(decode_token_ns=trunk.decode_token_ns, headroom_bytes=headroom_bytes)
        assert self._auditor is not None
        self._auditor.know_programs(trunk.programs)

    def _describe(self, **changes: Any) -> None:
        assert self._said is not None
        assert self._core is not None
        self._said = replace(self._said, **changes)
        self._core.command(Describe(self._said))

    # -- entering ----------------------------------------------------------------------------------

    async def _enter(self) -> KnownSwarm:
        """Learn the swarm's manifest from whoever answers at a bootstrap address, and remember it."""
        invite = self._files.load_invite()
        addresses = self._addresses_to_enter_by()
        failures = 0
        while True:
            for address in addresses:
                try:
                    return await self._enter_by(address, invite)
                except (KvasirError, RemoteProtocolError) as error:
                    self._contact = f"{address}: {error}"
                    log.warning("swarm_unreachable", address=address, reason=str(error))
            failures += 1
            await trio.sleep(retry_delay_s(failures, ENTER_DELAY_FIRST_S, ENTER_DELAY_MAX_S))

    def _addresses_to_enter_by(self) -> tuple[str, ...]:
        invite = self._files.load_invite()
        return (*(invite.addresses if invite else ()), *self._settings.bootstrap)

    async def _enter_by(self, address: str, invite: Invite | None) -> KnownSwarm:
        node_id = await self._host.connect(address)
        welcome = await self._greet(node_id)
        swarm = open_swarm_manifest(welcome.swarm_manifest, SwarmDigest(invite.swarm) if invite else None)
        self._files.save_swarm(welcome.swarm_manifest)
        log.info("swarm_entered", swarm=swarm.digest.hex(), model=swarm.manifest.model_name)
        return KnownSwarm(swarm, welcome.swarm_manifest)

    async def _greet(self, node_id: NodeId) -> Welcome:
        stream = await self._host.open_stream(node_id)
        try:
            welcome = await ask(stream, Hello((PROTOCOL_VERSION,), __version__), Welcome)
        finally:
            await stream.close()
        if welcome.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(f"it wants to speak version {welcome.version}", "incompatible_version")
        return welcome

    async def _keep_seeded(self, core: CoreDriver, network: SwarmNetwork) -> None:
        """Tell the core whom discovery has found; membership tries them for ever."""
        seeded: frozenset[NodeId] = frozenset()
        while True:
            candidates = frozenset(network.candidates()) - {self._host.node_id}
            if candidates != seeded:
                seeded = candidates
                core.command(Seed(tuple(sorted(candidates))))
            await network.wait_candidates()

    # -- events ------------------------------------------------------------------------------------

    async def _hear_events(self, core: CoreDriver) -> None:
        assert self._holder is not None
        assert self._backbone is not None
        assert self._auditor is not None
        assert self._completions is not None
        async for event in core.events:
            self._take_event(event)
            self._holder.take_event(event)
            self._auditor.take_event(event)
            self._backbone.take_event(event)
            self._completions.take_event(event)
            if core.view().state == "ready":
                self._last_error.note_ready()

    def _take_event(self, event: NodeEvent) -> None:
        network = self._network
        assert network is not None
        match event:
            case MemberChanged():
                log.info(
                    "member_changed",
                    node=event.node_id,
                    state=event.state,
                    condition=event.condition,
                    reason=event.reason,
                )
            case RecordChanged(node_id, record, _):
                if record is not None:
                    network.note_record(node_id, record.addresses)
                else:
                    network.note_gone(node_id)
            case ClockSuspected(offset):
                log.warning("clock_suspected", offset_s=None if offset is None else round(in_seconds(offset)))
            case InviteIssued(invite):
                waiting = self._invites.pop(invite.secret, None)
                if waiting is not None:
                    waiting.send_nowait(invite)
            case AdmissionFailed(code, reason):
                self._last_error.note(f"the invite was refused: {reason}")
                log.error("admission_failed", code=code, reason=reason)
            case _:
                log.debug("core_event", event_kind=type(event).__name__)

    # -- from other nodes --------------------------------------------------------------------------

    async def serve_stream(self, node_id: NodeId, stream: ControlStream) -> None:
        """Answer a node that opened a control stream; returns when the conversation is over."""
        try:
            while True:
                message = await hear(stream)
                match message:
                    case Hello():
                        await tell(stream, self._welcome(message))
                    case ManifestRequest() if self._pieces is not None:
                        await tell(stream, self._pieces.answer(message))
                    case SourceRequest() if self._pieces is not None:
                        await tell(stream, self._pieces.sources(message))
                    case DataRequest() if self._holder is not None:
                        await tell(stream, await self._holder.grant_data(node_id, message))
                    case _:
                        raise RemoteProtocolError(f"{message.kind} is not for us now", "unexpected_message")
        except TransportUnavailable:
            return  # it has said all it had to say
        except RemoteProtocolError as error:
            log.info("conversation_refused", node=node_id, code=error.code, reason=str(error))
            await refuse(stream, error)
        except KvasirError as error:
            log.error("request_failed", node=node_id, reason=str(error))
            await refuse(stream, RemoteProtocolError(str(error), error.code))

    def _welcome(self, hello: Hello) -> Welcome:
        if PROTOCOL_VERSION not in hello.versions:
            raise RemoteProtocolError(
                f"this swarm speaks version {PROTOCOL_VERSION}, you {list(hello.versions)}",
                "incompatible_version",
            )
        if self._known is None:
            raise RemoteProtocolError("this node is in no swarm yet", "not_a_member")
        return Welcome(PROTOCOL_VERSION, self._known.signed_manifest)

    # -- from the user -----------------------------------------------------------------------------

    @property
    def backbone(self) -> BackboneDuty:
        """The duty that runs sessions. Raises `NotReady` before the node has entered its swarm."""
        if self._backbone is None:
            raise NotReady(f"this node is joining: {self._contact}")
        return self._backbone

    @property
    def completions(self) -> SwarmCompletions:
        """Sessions on whichever node is the backbone. Raises `NotReady` before it has entered its swarm."""
        if self._completions is None:
            raise NotReady(f"this node is joining: {self._contact}")
        return self._completions

    async def ping(self, node_id: NodeId) -> int:
        """The time in nanoseconds that another node takes to answer on a control stream.

        Raises `TransportUnavailable` where it cannot be reached in bounded time.
        """
        if self._network is not None and node_id != self._host.node_id:
            await self._network.reach(node_id)
        stream = await self._host.open_stream(node_id)
        try:
            started = self._now()
            await ask(stream, Hello((PROTOCOL_VERSION,), __version__), Welcome)
            return self._now() - started
        finally:
            await stream.close()

    async def issue_invite(self, request: IssueInvite) -> Invite:
        """An invite that is on disk. Raises `NotReady`, or `LocalProtocolError` where we may issue none."""
        if self._core is None:
            raise NotReady(f"this node is joining: {self._contact}")
        issued, taken = trio.open_memory_channel[Invite](1)
        self._invites[request.secret] = issued
        try:
            self._core.command(request)
            with trio.fail_after(_INVITE_TIMEOUT_S):
                return await taken.receive()
        except trio.TooSlowError:
            raise NotReady("the invite could not be saved: see the log") from None
        finally:
            self._invites.pop(request.secret, None)

    async def recover(self, link: bytes) -> int:
        """Begin the epoch that this link begins, and say which, once it is on disk.

        Raises `NotReady` before this node has entered its swarm, and where it could not be saved;
        `RemoteProtocolError` for a link that begins none.
        """
        core = self._core
        if core is None:
            raise NotReady(f"this node is joining: {self._contact}")
        before = core.view().electorate
        core.command(Recover(link))
        await core.flush()
        electorate = core.view().electorate
        if electorate.epoch <= before.epoch:
            raise RemoteProtocolError("an epoch as late is known already", "wrong_recovery")
        if core.has_unsaved:
            raise NotReady("the new epoch could not be saved: see the log")
        log.warning("epoch_begun", epoch=electorate.epoch, electors=len(electorate.members))
        return electorate.epoch

    async def revoke(self, revocation: bytes) -> None:
        """Take in and spread what the founder's key signed; returns once it is on disk.

        Raises `NotReady` before this node has entered its swarm, and where it could not be saved;
        `RemoteProtocolError` for what that key has not signed.
        """
        core = self._core
        if core is None:
            raise NotReady(f"this node is joining: {self._contact}")
        core.command(Revoke(revocation))
        await core.flush()
        if core.has_unsaved:
            raise NotReady("the revocation could not be saved: see the log")

    def electorate_digest(self) -> bytes:
        """The digest of the newest electorate known here, for invites. Raises `NotReady`."""
        if self._core is None:
            raise NotReady(f"this node is joining: {self._contact}")
        return self._core.view().electorate.digest()

    # -- what is going on --------------------------------------------------------------------------

    def state(self) -> tuple[str, str]:
        """One word and its reason."""
        if self._core is None:
            return "joining", self._contact
        view = self._core.view()
        assert self._backbone is not None
        assert self._holder is not None
        assert self._certifier is not None
        if view.state == "revoked":
            return view.state, view.reason
        if self._certifier.is_needed and view.state not in ("conflicted", "stopping"):
            return "certifying", self._certifier.progress or self._holder.state()[1]
        if view.fence is not None and view.fence.backbone == self._host.node_id and view.lease_until:
            word, reason = self._backbone.state()
            if word == view.state == "joining" and view.plan is None:
                return view.state, view.reason  # the core knows how many it waits for
            return (word, reason) if word != "ready" or view.state == "ready" else (view.state, view.reason)
        if view.state == "loading":
            return self._holder.state()
        return view.state, view.reason

    async def wait_model(self) -> StoredModel:
        """The swarm's model, once it is in this home."""
        await self._has_model.wait()
        assert self._model is not None
        return self._model.stored

    async def sources(self, known: StatusSources) -> StatusSources:
        """As `sources_now`, with the counters of an engine, if it answers."""
        known = self.sources_now(known)
        if self._holder is None or self._backbone is None:
            return known
        view = known.view
        is_backbone = view is not None and view.fence is not None and view.fence.backbone == known.node_id
        return replace(
            known, statistics=await _statistics_of(self._backbone if is_backbone else self._holder)
        )

    def sources_now(self, known: StatusSources) -> StatusSources:
        """What a status document is made of: what the daemon knows, and all that this duty does.

        Never waits, and so has no counters of an engine.
        """
        core = self._core
        known = replace(
            known,
            swarm=self._known.swarm if self._known is not None else None,
            model=self._model.stored if self._model is not None else None,
            last_error=self._last_error.report(),
        )
        if core is None or self._holder is None or self._backbone is None:
            return known
        return replace(
            known,
            view=core.view(),
            proof=core.proof,
            record_of=core.record_of,
            verdict_of=core.verdict_of,
            holder=self._holder.report(),
            backbone=self._backbone.report(),
        )

    async def leave(self) -> None:
        """Leave the swarm in good order: stop sampling, give the lease back, say goodbye; in bounded time."""
        core = self._core
        if core is None:
            return
        with trio.move_on_after(LEAVE_TIMEOUT_S):
            if self._backbone is not None:
                await self._backbone.release("it is stopping")
            try:
                core.command(Leave("the node stops"))
            except (LocalProtocolError, RemoteProtocolError) as error:
                log.warning("leaving_failed", reason=str(error))
            await core.flush()
            if self._network is not None:
                await self._network.flush()


async def _statistics_of(duty: HolderDuty | BackboneDuty) -> Mapping[str, Any] | None:
    """The counters of a duty's engine; None where it has none or does not answer."""
    try:
        statistics: dict[str, Any] = json.loads(await duty.engine_statistics())
    except (KvasirError, ValueError) as error:
        log.debug("engine_statistics_unavailable", reason=str(error))
        return None
    return statistics


def check_bootstrap(
    addresses: tuple[str, ...], node_id: NodeId, *, has_swarm: bool, has_invite: bool, has_slots: bool
) -> None:
    """Raise `ConfigurationInvalid` where a node has neither a swarm, nor an invite, nor anybody to ask."""
    others = [each for each in addresses if not each.endswith(f"/{node_id}")]
    if addresses and not others and not has_swarm:
        raise ConfigurationInvalid("swarm.bootstrap names this node itself and nobody else")
    if not others and not has_swarm and not has_invite and has_slots:
        raise ConfigurationInvalid(
            "this home was in a swarm and its swarm-manifest is missing: put back a copy of that file, or "
            "have a member of that swarm give it again with 'kvasir-node run --join ADDRESS'"
        )
    if not others and not has_swarm and not has_invite:
        raise ConfigurationInvalid(
            "nothing to do: this home is in no swarm. Found one with 'kvasir-node init --found', or enter "
            "one with 'kvasir-node run --join INVITE', or --join with a member's address"
        )
