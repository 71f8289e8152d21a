"""The composition root: puts one node together from its parts and runs it until told to stop.

The only place that knows concrete adapters (libp2p, files, processes) and that reads clocks. Order of start:
lock, identity, control socket, network, duty; so that `status` answers before anything can be slow. Stopping
runs the other way round and within a bounded time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import trio

from kvasir_node.certification.kept_measurements import KeptMeasurements
from kvasir_node.config import Configuration
from kvasir_node.control import ControlServer
from kvasir_node.driver.backbone_duty import BackboneSettings
from kvasir_node.driver.gateway_duty import GatewayDuty, GatewaySettings
from kvasir_node.driver.generation_elsewhere import generate_elsewhere
from kvasir_node.driver.holder_duty import HolderSettings
from kvasir_node.driver.node_duty import (
    ModelOnDisk,
    NodeDuty,
    NodeSettings,
    TakeManifest,
    check_bootstrap,
)
from kvasir_node.driver.status_report import NO_GATEWAY, StatusSources, status_document
from kvasir_node.experts_on_disk import ExpertsOnDisk, ShelfOnDisk
from kvasir_node.gateway.chat_template import ChatTemplates
from kvasir_node.gateway.doors import Doors
from kvasir_node.gateway.ports import GeneratedToken, TokenRequest
from kvasir_node.gateway_token import load_gateway_token
from kvasir_node.held_back import is_held_back
from kvasir_node.home_lock import HomeLock
from kvasir_node.kernel_in_use import KernelInUse, kernel_in_use
from kvasir_node.kernels.opencl_devices import ANY_DEVICE
from kvasir_node.locations import Locations
from kvasir_node.model.expert_cache import ExpertCache
from kvasir_node.model.model_manifest import Progress
from kvasir_node.model.model_url import ModelUrl, location_of
from kvasir_node.model.store import DEMO_MODEL, ModelStore, StoredModel
from kvasir_node.net.host import HostOptions, Libp2pHost
from kvasir_node.net.identity import NodeIdentity, load_or_create_identity
from kvasir_node.net.last_port import LastPort
from kvasir_node.net.swarm_network import Libp2pSwarmNetwork, NetworkOptions
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import Claim, EnginePort
from kvasir_node.supervisor import start_engine
from kvasir_node.swarm_files import KnownSwarm, SwarmFiles
from kvasir_node.telemetry import bind_process, get_logger
from kvasir_node.tokenizer.child_tokenizer import ChildTokenizer
from kvasir_proto.admission import IssueInvite, format_invite
from kvasir_proto.errors import (
    ConfigurationInvalid,
    LocalProtocolError,
    ModelUnusable,
    NotReady,
    PortInUse,
    RemoteProtocolError,
    TransportUnavailable,
    UsageError,
)
from kvasir_proto.gossip_rules import is_announcement, is_record, record_in_store
from kvasir_proto.ids import NodeId, SwarmDigest
from kvasir_proto.instants import Duration, Instant, WallTime
from kvasir_proto.limits import Role
from kvasir_proto.manifest import ModelManifest
from kvasir_proto.measured_kernel import KeptMeasurement
from kvasir_proto.messages.engine import SessionEnded, TokenEmitted
from kvasir_proto.messages.local import (
    EvaluateReply,
    EvaluateRequest,
    GenerateEnd,
    GenerateRequest,
    InviteReply,
    InviteRequest,
    PingReply,
    PingRequest,
    RecoveryReply,
    RecoveryRequest,
    RevocationReply,
    RevocationRequest,
    TokenEvent,
)
from kvasir_proto.node_core import LAN
from kvasir_proto.swarm_manifest import AdmissionRule, CertificateRule, ElectorateRule

log = get_logger()

INVITE_ADDRESSES_MAX: Final = 8
HEALTH_INTERVAL_S: Final = 12.0
"""Connections are probed this seldom, because membership probes the members themselves."""
STOP_TIMEOUT_S: Final = 25.0
"""For everything that ends in good order; then the process ends without it, and its engines with it."""


def now() -> Instant:
    """The monotonic clock that counts suspend."""
    return Instant(time.clock_gettime_ns(time.CLOCK_BOOTTIME))


def wall_time() -> WallTime:
    """The calendar, as far as this machine knows it."""
    return WallTime(time.time_ns())


@dataclass(frozen=True, slots=True)
class Home:
    """An opened home: where things are, what was configured, who this node is."""

    locations: Locations
    configuration: Configuration
    identity: NodeIdentity

    @property
    def swarm_files(self) -> SwarmFiles:
        """What this home remembers of its swarm."""
        return SwarmFiles(self.locations.state)

    @property
    def bootstrap(self) -> tuple[str, ...]:
        """Addresses of members to enter by: those configured, then those that `init --join` was given."""
        return tuple(dict.fromkeys((*self.configuration.swarm_bootstrap, *self.swarm_files.load_bootstrap())))

    @property
    def models(self) -> ModelStore:
        """The models of this home."""
        return ModelStore(self.locations.models)


def open_home(locations: Locations, configuration: Configuration) -> Home:
    """Make the directories and the identity where they are missing."""
    locations.prepare()
    return Home(locations, configuration, load_or_create_identity(locations.identity_file))


def resolve_model(
    home: Home,
    name_or_path: str | None,
    progress: Progress | None = None,
    judge: Callable[[Path], None] | None = None,
) -> StoredModel:
    """The model that a user means: a file, a name or digest in the store, or the demo model for None.

    ``demo`` is the demo model too, unless the store has another of that name. A file, or what is at an
    address (`ModelStore.pull`), is taken into the store;
    ``progress`` is told (bytes done, bytes in all), and ``judge`` shown its backbone file (see
    `ModelStore.add`). Raises `ModelUnusable`.
    """
    if name_or_path is None:
        return home.models.add(DEMO_MODEL, progress)
    location = location_of(name_or_path)
    if isinstance(location, ModelUrl):
        cache = ExpertCache(home.locations.models, home.configuration.models_cache_bytes)
        return home.models.pull(location, progress, judge, experts_bytes_max=cache.room_bytes())
    path = location.expanduser()
    if path.suffix == ".gguf" or path.exists():
        return home.models.add(path, progress, judge)
    return home.models.get(name_or_path)


def found_swarm(
    home: Home,
    model: StoredModel,
    *,
    compact_activations: bool = False,
    partial_sums: bool = False,
    admission: AdmissionRule = "open",
    electorate: ElectorateRule = "open",
    certificates: CertificateRule = "claimed",
) -> KnownSwarm:
    """Found a swarm for ``model`` in this home; see `SwarmManifest` for what it may be founded with.

    Raises `AlreadyRunning` while a daemon runs in it, `ConfigurationInvalid` when it belongs to a swarm.
    """
    with HomeLock(home.locations.lock_file):
        return home.swarm_files.found(
            home.identity.private_key,
            model.manifest.digest(),
            model.name,
            compact_activations=compact_activations,
            partial_sums=partial_sums,
            admission=admission,
            electorate=electorate,
            certificates=certificates,
        )


def _memory_offered_bytes(configuration: Configuration) -> int:
    """What is offered for shards, in bytes: what the user said, or half of the machine's memory."""
    if configuration.node_memory_mib is not None:
        return configuration.node_memory_mib << 20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Node:
    """A running daemon. It is the `Operator` behind the control socket."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._duty: NodeDuty | None = None
        self._addresses: tuple[str, ...] = ()
        self._has_duty = trio.Event()
        self._gateway: GatewayDuty | None = None
        self._stopping = trio.Event()
        self._started = now()

    # -- Operator ----------------------------------------------------------------------------------

    async def status_document(self) -> str:
        """The status report as JSON; complete in every state, also before anything is ready."""
        sources = self._own_sources()
        if self._duty is not None:
            sources = await self._duty.sources(sources)
        return json.dumps(status_document(sources, now()))

    def _own_sources(self) -> StatusSources:
        """What this process knows of itself."""
        state, reason = self._duty.state() if self._duty is not None else ("starting", "opening the network")
        if self._stopping.is_set():
            state, reason = "stopping", ""
        return StatusSources(
            node_id=self._home.identity.node_id,
            state=state,
            reason=reason,
            started=self._started,
            pid=os.getpid(),
            addresses=self._addresses,
            is_held_back=is_held_back(),
            gateway=self.gateway_report(),
        )

    def _sources_now(self) -> StatusSources:
        """All that is known now, without asking an engine."""
        sources = self._own_sources()
        return sources if self._duty is None else self._duty.sources_now(sources)

    def gateway_report(self) -> Mapping[str, Any]:
        """Where the gateway answers, or why it does not."""
        return NO_GATEWAY if self._gateway is None else self._gateway.report()

    async def generate(
        self, request: GenerateRequest, emit: Callable[[TokenEvent], Awaitable[None]]
    ) -> GenerateEnd:
        """Run a session, on this node's engine where it is the backbone, else where the gateway's run.

        Raises `NotReady` where nobody could begin it, and on a node that is neither backbone nor gateway.
        """
        duty = self._running_duty().backbone
        gateway = self._gateway
        if gateway is not None and duty.reign_version is None:
            gateway.require_model()
            return await generate_elsewhere(
                request,
                emit,
                completions=self._running_duty().completions,
                tokenizer=gateway.tokenizer,
                now=now,
            )

        async def pass_on(token: TokenEmitted) -> None:
            await emit(TokenEvent(token.position, token.token, token.piece))

        ended = await duty.generate(request, pass_on)
        return GenerateEnd(ended.reason, ended.code, ended.detail, json.dumps(_session_report(ended)))

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Write the live swarm's logits for these tokens. Raises `NotReady` on a node without the lease."""
        return await self._running_duty().backbone.evaluate(request)

    async def ping(self, request: PingRequest) -> PingReply:
        """One round trip to a member on a control stream."""
        timeout_s = request.timeout_ms / 1000
        try:
            with trio.fail_after(timeout_s):
                return PingReply(await self._running_duty().ping(request.node_id))
        except trio.TooSlowError:
            raise TransportUnavailable(f"no answer within {timeout_s:g} s") from None
        except RemoteProtocolError as error:
            raise TransportUnavailable(f"it answers with a refusal: {error.reason}") from error

    async def issue_invite(self, request: InviteRequest) -> InviteReply:
        """An invite by this node. Raises `NotReady`, also where it is neither elector nor founder."""
        duty = self._running_duty()
        try:
            invite = await duty.issue_invite(
                IssueInvite(
                    secret=secrets.token_bytes(16),
                    electorate_digest=duty.electorate_digest(),
                    ranks=request.ranks,
                    addresses=self._addresses[:INVITE_ADDRESSES_MAX],
                    lifetime=Duration(request.lifetime_ns),
                )
            )
        except LocalProtocolError as error:
            raise NotReady(error.reason) from error
        return InviteReply(format_invite(invite))

    async def recover(self, request: RecoveryRequest) -> RecoveryReply:
        """A new epoch. Raises `NotReady`, or `UsageError` where the link begins none."""
        try:
            return RecoveryReply(await self._running_duty().recover(request.link))
        except RemoteProtocolError as error:
            raise UsageError(f"this begins no epoch here: {error.reason}") from error

    async def revoke(self, request: RevocationRequest) -> RevocationReply:
        """A revocation that counts from now on. Raises `NotReady`, or `UsageError` for one that does not."""
        try:
            await self._running_duty().revoke(request.revocation)
        except RemoteProtocolError as error:
            raise UsageError(f"this revokes nothing here: {error.reason}") from error
        return RevocationReply()

    def _running_duty(self) -> NodeDuty:
        if self._duty is None:
            raise NotReady("this node is starting")
        return self._duty

    def stop(self) -> None:
        """Begin to stop in good order."""
        self._stopping.set()

    # -- life --------------------------------------------------------------------------------------

    async def run(
        self,
        on_listening: Callable[[tuple[str, ...]], None],
        stop_on_eof: bool = False,
        early: Sequence[int] = (),
    ) -> None:
        """Live until `stop`, SIGTERM, SIGINT or SIGHUP; with ``stop_on_eof`` also until standard input ends.

        ``on_listening`` is called once, with our multiaddresses, when the control socket answers and the
        network is open. ``early`` has the signals that came before we listen for them. Raises the first error
        that makes going on pointless.
        """
        home = self._home
        with HomeLock(home.locations.lock_file):
            bind_process(node=home.identity.node_id)
            self._gateway = self._make_gateway()
            async with open_unwrapping_nursery() as outer:
                await outer.start(self._watch_signals, early)
                if stop_on_eof:
                    outer.start_soon(self._watch_standard_input)
                await outer.start(ControlServer(home.locations.control_socket, self).run)
                async with open_unwrapping_nursery() as nursery:
                    nursery.start_soon(self._run_duty, nursery, on_listening)
                    await self._stopping.wait()
                    log.info("node_stopping")
                    outer.start_soon(_end_late_process)
                    async with trio.open_nursery() as leaving:
                        if self._gateway is not None:
                            leaving.start_soon(self._gateway.end)
                        if self._duty is not None:
                            leaving.start_soon(self._duty.leave)
                    nursery.cancel_scope.cancel()
                # Last, so that whoever asked us to stop hears of it when everything else has ended.
                outer.cancel_scope.cancel()
        log.info("node_stopped")

    async def _watch_standard_input(self) -> None:
        async with trio.lowlevel.FdStream(os.dup(0)) as stream:
            with contextlib.suppress(trio.BrokenResourceError, OSError):
                while await stream.receive_some():
                    pass
        log.info("standard_input_ended")
        self.stop()

    async def _watch_signals(self, early: Sequence[int], *, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            if early:
                self.stop()
            async for number in signals:
                log.info("signal_received", signal=signal.Signals(number).name)
                if number == signal.SIGHUP and self._stopping.is_set():
                    continue  # a terminal that closes, or a service manager, sends it beside another
                if self._stopping.is_set():
                    os._exit(1)  # asked twice: at once
                self.stop()

    async def _run_duty(self, nursery: trio.Nursery, on_listening: Callable[[tuple[str, ...]], None]) -> None:
        home, configuration = self._home, self._home.configuration
        await trio.to_thread.run_sync(self._check_home, abandon_on_cancel=True)
        if self._gateway is not None:
            nursery.start_soon(self._gateway.run)
        last_port = LastPort(home.locations.state / "listen-port")
        options = HostOptions(
            configuration.listen_host,
            configuration.listen_port,
            last_port=last_port.load(),
            health_interval_s=HEALTH_INTERVAL_S,
        )
        async with Libp2pHost(home.identity, options) as host:
            await trio.to_thread.run_sync(last_port.save, host.port)
            duty = await trio.to_thread.run_sync(self._make_duty, host, abandon_on_cancel=True)
            host.set_stream_handler(duty.serve_stream)
            self._addresses = host.addresses()
            self._duty = duty
            self._has_duty.set()
            log.info("node_listening", addresses=list(self._addresses))
            on_listening(self._addresses)
            await duty.run()

    def _make_gateway(self) -> GatewayDuty | None:
        """The gateway, unless it is switched off. Raises `ConfigurationInvalid` where it needs a token."""
        home, configuration = self._home, self._home.configuration
        if not configuration.gateway_enabled:
            return None
        token = load_gateway_token(home.locations.gateway_token_file)
        try:
            doors = Doors(
                configuration.gateway_host,
                token,
                is_android=_is_android(),
                names=frozenset(configuration.gateway_names),
                origins=frozenset(configuration.gateway_origins),
            )
        except ConfigurationInvalid as error:
            where = home.locations.gateway_token_file
            raise ConfigurationInvalid(f"{error}. It is looked for in {where}") from error
        return GatewayDuty(
            settings=GatewaySettings(doors, configuration.gateway_port, configuration.engine_context_tokens),
            completions=_SwarmSessions(self),
            tokenizer=ChildTokenizer(),
            templates=ChatTemplates(),
            open_listeners=_open_listeners,
            known=self._sources_now,
            wait_model=self._wait_model,
            now=now,
        )

    async def _wait_model(self) -> StoredModel:
        await self._has_duty.wait()
        return await self._running_duty().wait_model()

    def _check_home(self) -> None:
        """Raise `ConfigurationInvalid` where nothing is to be done or trusted, before a port is opened."""
        home = self._home
        files = home.swarm_files
        files.remove_leftovers()
        files.check_undamaged()
        known = files.load_swarm()
        if known is not None:
            files.claim_slots(known.swarm.digest, home.identity.node_id)
        check_bootstrap(
            home.bootstrap,
            home.identity.node_id,
            has_swarm=known is not None,
            has_invite=files.load_invite() is not None,
            has_slots=files.has_slots(),
        )

    def _make_duty(self, host: Libp2pHost) -> NodeDuty:
        home, configuration = self._home, self._home.configuration
        files = home.swarm_files
        return NodeDuty(
            node_key=home.identity.private_key,
            files=files,
            save_slot=lambda slot, data: trio.to_thread.run_sync(files.save_slot, slot, data),
            host=host,
            start_network=_NetworkStarter(home, host),
            find_model=self._find_model_in_thread,
            find_backbone_file=lambda model: trio.to_thread.run_sync(
                model.verified_backbone_path, abandon_on_cancel=True
            ),
            start_engine=lambda digest: _EngineStarter(home, digest),
            next_generation=files.next_generation,
            measurements=_MeasurementsOnDisk(KeptMeasurements(home.locations.measurements)),
            is_held_back=is_held_back,
            settings=_node_settings(configuration, home.bootstrap),
            entropy=random.Random(secrets.token_bytes(32)),  # noqa: S311 - seeded from what nobody knows
            now=now,
            wall_time=wall_time,
            keep_experts=lambda model, members: ExpertsOnDisk(
                ExpertCache(home.locations.models, configuration.models_cache_bytes), model, members
            ),
            experts_here=ShelfOnDisk,
            take_manifest=self._manifest_taker(),
        )

    def _manifest_taker(self) -> TakeManifest | None:
        """What takes the swarm's model in by its manifest: from an address, or without any.

        None where a file or a name is configured, or a backbone file is needed and no address may be had.
        """
        configured = self._home.configuration.model
        follow = self._home.configuration.models_follow_addresses
        url = location_of(configured or "")
        if configured is None and not self._needs_backbone_file:
            return self._take_manifest
        if not isinstance(url, ModelUrl) and (configured is not None or not follow):
            return None

        async def take(manifest: ModelManifest, told: Sequence[str]) -> None:
            urls = (url,) if isinstance(url, ModelUrl) else _urls_of(told)
            await trio.to_thread.run_sync(self._pull_from_any, urls, manifest, abandon_on_cancel=True)

        return take

    def _pull_from_any(self, urls: Sequence[ModelUrl], manifest: ModelManifest) -> None:
        """Take the model in from the first of these that has it. Raises `ModelUnusable` with all reasons."""
        reasons = []
        for each in urls:
            try:
                self._home.models.pull(each, manifest=manifest)
            except ModelUnusable as error:
                reasons.append(str(error))
            else:
                return
        raise ModelUnusable("; ".join(reasons) or "no member tells an address of the model")

    @property
    def _needs_backbone_file(self) -> bool:
        return "backbone" in self._home.configuration.node_ranks

    async def _take_manifest(self, manifest: ModelManifest, _told: Sequence[str]) -> None:
        await trio.to_thread.run_sync(self._home.models.take_manifest, manifest, abandon_on_cancel=True)

    async def _find_model_in_thread(self, digest: bytes) -> ModelOnDisk:
        return await trio.to_thread.run_sync(self._find_model_on_disk, digest, abandon_on_cancel=True)

    def _find_model_on_disk(self, digest: bytes) -> ModelOnDisk:
        try:
            return ModelOnDisk(self._find_model(digest), has_experts=True)
        except ModelUnusable:
            return ModelOnDisk(self._find_model(digest, needs_source=False), has_experts=False)

    def _find_model(self, digest: bytes, needs_source: bool = True) -> StoredModel:
        """The swarm's model, from this home's store, the configured file, or the package's demo model.

        ``needs_source``: whether its experts will be read; a backbone has its own file.
        """
        home = self._home
        for stored in home.models.list():
            if stored.source is None and self._needs_backbone_file:
                continue
            if stored.manifest.digest() == digest and (stored.has_source or not needs_source):
                return stored
        for candidate in (home.configuration.model, None):
            if isinstance(location_of(candidate or ""), ModelUrl):
                continue  # its manifest comes from others: nobody reads all of it for that
            stored = resolve_model(home, candidate)
            if stored.manifest.digest() == digest:
                return stored
        mended = home.models.mended(digest.hex())
        if mended is not None and (mended.has_source or not needs_source):
            return mended
        raise ModelUnusable(
            f"the swarm's model {digest.hex()[:12]} is not here: add its file with "
            "'kvasir-node models add FILE'"
            + (
                ", or run with '--ranks output,bulk' to have experts from others"
                if self._needs_backbone_file
                else ""
            )
        )


@dataclass(frozen=True, slots=True)
class _SwarmSessions:
    """Sessions of a node whose duties may not have begun yet (see `gateway.ports.Completions`)."""

    node: Node

    def open(self, request: TokenRequest) -> AbstractAsyncContextManager[AsyncIterator[GeneratedToken]]:
        return self.node._running_duty().completions.open(request)


def _is_android() -> bool:
    """Whether this machine's other programs are strangers that reach loopback too."""
    return hasattr(sys, "getandroidapilevel") or {"ANDROID_ROOT", "ANDROID_DATA"} <= set(os.environ)


async def _open_listeners(host: str, port: int) -> Sequence[trio.SocketListener]:
    """Sockets for clients of the gateway. Raises `PortInUse`, `TransportUnavailable`."""
    try:
        return await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"port {port} of {host} is in use by another program") from error
        raise TransportUnavailable(f"cannot listen at {host}: {error.strerror or error}") from error


def _urls_of(told: Sequence[str]) -> tuple[ModelUrl, ...]:
    """The addresses among what a member told; what is none, or names a file of this machine, is none."""
    urls = []
    for each in told:
        with contextlib.suppress(UsageError):
            urls.append(ModelUrl(each))
    return tuple(urls)


async def _end_late_process() -> None:
    await trio.sleep(STOP_TIMEOUT_S)
    log.error("stop_took_too_long", timeout_s=STOP_TIMEOUT_S)
    os._exit(1)


def _kernels_of(configuration: Configuration) -> tuple[KernelInUse, ...]:
    """The kernels that this node computes with: as holder, and as backbone what falls to itself.

    Raises `ConfigurationInvalid` for a device or build that is not there: before this node is heard of.
    """
    own = kernel_in_use("ggml-cpu", ANY_DEVICE)
    if configuration.engine_kernel == "ggml-cpu":
        return (own,)
    return (kernel_in_use(configuration.engine_kernel, configuration.engine_kernel_device), own)


@dataclass(frozen=True, slots=True)
class _MeasurementsOnDisk:
    """What was measured of this home's kernels before (see `MeasurementStore`)."""

    kept: KeptMeasurements

    async def load(self, key: bytes) -> KeptMeasurement | None:
        return await trio.to_thread.run_sync(self.kept.load, key)

    async def save(self, key: bytes, kept: KeptMeasurement) -> None:
        await trio.to_thread.run_sync(self.kept.save, key, kept)


def _node_settings(configuration: Configuration, bootstrap: tuple[str, ...]) -> NodeSettings:
    kernels = _kernels_of(configuration)
    placement = replace(
        LAN.placement,
        workers_min=max(1, configuration.swarm_workers_min),
        holders=configuration.swarm_holders or LAN.placement.holders,
    )
    memory_bytes = _memory_offered_bytes(configuration)
    return NodeSettings(
        bootstrap=bootstrap,
        core=replace(LAN, placement=placement),
        ranks=configuration.node_ranks,
        nominees=tuple(NodeId(each) for each in configuration.swarm_electors),
        memory_bytes=memory_bytes,
        kernels=kernels if "backbone" in configuration.node_ranks else kernels[:1],
        holder=HolderSettings(
            data_host=configuration.listen_host,
            data_port=configuration.data_port,
            n_threads=configuration.engine_threads,
            memory_bytes=memory_bytes,
            kernel=configuration.engine_kernel,
            kernel_device=configuration.engine_kernel_device,
        ),
        backbone=BackboneSettings(
            n_ctx=configuration.engine_context_tokens,
            n_ubatch=configuration.engine_ubatch_tokens,
            n_threads=configuration.engine_threads,
            device=configuration.engine_device,
            memory_bytes=memory_bytes,
            standby=True,
            n_sessions=configuration.engine_sessions,
        ),
        give_bytes_per_second=configuration.models_give_mib_per_second << 20,
        tell_addresses=configuration.models_tell_address,
        follow_addresses=configuration.models_follow_addresses,
    )


@dataclass(frozen=True, slots=True)
class _NetworkStarter:
    """Starts what is between the nodes of a swarm (see `ports.NetworkStarter`)."""

    home: Home
    host: Libp2pHost

    async def __call__(self, nursery: trio.Nursery, swarm: SwarmDigest) -> Libp2pSwarmNetwork:
        known = self.home.swarm_files.load_swarm()
        assert known is not None, "a network is of the swarm that the home belongs to"
        configuration, founded = self.home.configuration, known.swarm
        invite = self.home.swarm_files.load_invite()

        def judge(data: bytes) -> Claim | None:
            opened = record_in_store(data, swarm, wall_time())
            return None if opened is None else Claim(opened.said.node_id, opened.said.sequence)

        network = Libp2pSwarmNetwork(
            self.host,
            swarm,
            accept={"records": lambda data: is_record(data, founded), "terms": is_announcement},
            judge=judge,
            options=NetworkOptions(
                told=(*(invite.addresses if invite else ()), *self.home.bootstrap),
                members_file=self.home.locations.state / "members.json",
                lan=configuration.swarm_lan,
            ),
            entropy=random.Random(secrets.token_bytes(32)),  # noqa: S311 - spreads load
        )
        await network.start(nursery)
        return network


@dataclass(frozen=True, slots=True)
class _EngineStarter:
    """Starts engine processes for this home (see `ports.EngineStarter`)."""

    home: Home
    swarm_digest: SwarmDigest

    async def __call__(self, nursery: trio.Nursery, role: Role, generation: int) -> EnginePort:
        return await start_engine(
            nursery,
            role,
            node_key=self.home.identity.private_key,
            swarm_digest=self.swarm_digest,
            generation=generation,
            directory=self.home.locations.runtime,
            log_level=self.home.configuration.log_level,
            log_format=self.home.configuration.log_format,
        )


def _session_report(ended: SessionEnded) -> dict[str, Any]:
    return {
        "n_prompt": ended.n_prompt,
        "n_generated": ended.n_generated,
        "prompt_s": ended.prompt_ns / 1e9,
        "decode_s": ended.decode_ns / 1e9,
        "tokens_per_second": ended.tokens_per_second,
        "rows_retried": ended.rows_retried,
        "hook_calls": ended.hook_calls,
    }
