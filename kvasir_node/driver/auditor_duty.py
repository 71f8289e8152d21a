"""A node as auditor: it challenges whom its core names, through its own worker engine, and says what it saw.

Which node, and when, the core has decided before; how rows are compared is the engine's affair. What is
between: the way to the other engine, whether the certificate that it shows is the one its record names, and
which of its experts are asked about, drawn so that nobody can know them. It refuses to judge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

import trio

from kvasir_node.driver.conversation import ask
from kvasir_node.driver.holder_duty import HolderDuty
from kvasir_node.model.store import StoredModel
from kvasir_node.ports import ExpertKeeper, Host, SwarmCore
from kvasir_node.telemetry import get_logger
from kvasir_proto.accusations import RecomputationDue, Recomputed
from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.errors import EngineFailed, KvasirError, RemoteProtocolError, TransportUnavailable
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import WallTime
from kvasir_proto.limits import RANKS, Rank, as_sentence
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.messages.engine import ChallengeHolder, HolderChallenged, RecomputeRows, RowsRecomputed
from kvasir_proto.messages.swarm import DataGrant, DataRequest
from kvasir_proto.node_core import NodeEvent
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.tolerance_certificate import ToleranceCertificate, open_certificate
from kvasir_proto.verification import ChallengeDone, ChallengeDue, ChallengeFailed, ChallengeResult

if TYPE_CHECKING:
    import random

log = get_logger()

CHALLENGE_TIMEOUT_S: Final = 90.0
EXPERTS_ASKED: Final = 2
"""Experts that a challenge asks about: one layer of each kind of weights first."""
_WAITING_MAX: Final = 4
"""Challenges that wait; the core asks for one at a time."""
_SENSITIVE: Final[tuple[Rank, ...]] = ("backbone", "output")


class AuditorDuty:
    """This node as auditor. `run` until cancelled; `take_event` hears everything the core tells."""

    def __init__(
        self,
        *,
        swarm: FoundedSwarm,
        model: StoredModel,
        core: SwarmCore,
        host: Host,
        holder: HolderDuty,
        entropy: random.Random,
        wall_time: Callable[[], WallTime],
        experts: ExpertKeeper | None = None,
    ) -> None:
        """``experts`` has those on the disk that others are asked about; None: the model's file is here."""
        self._swarm = swarm
        self._model = model
        self._core = core
        self._host = host
        self._holder = holder
        self._entropy = entropy
        self._wall_time = wall_time
        self._experts = experts
        self._programs: tuple[bytes, ...] = ()
        """Digests of the programs that the model asks for, as far as they are known."""
        self._due_in, self._due = trio.open_memory_channel[ChallengeDue | RecomputationDue](_WAITING_MAX)

    def take_event(self, event: NodeEvent) -> None:
        """Note what the core tells; never waits."""
        if isinstance(event, ChallengeDue | RecomputationDue):
            with contextlib.suppress(trio.WouldBlock):  # the core takes it for failed after a while
                self._due_in.send_nowait(event)

    def know_programs(self, programs: tuple[bytes, ...]) -> None:
        """This node's own trunk asks for these: who accuses by others has made them up."""
        self._programs = programs or self._programs

    async def run(self) -> NoReturn:
        """Challenge and recompute what the core names, one after the other."""
        async for due in self._due:
            node_id = due.node_id
            result: ChallengeResult | Recomputed
            try:
                with trio.fail_after(CHALLENGE_TIMEOUT_S):
                    if isinstance(due, RecomputationDue):
                        result = await self._recompute(due)
                    else:
                        result = await self._challenge(node_id)
            except (KvasirError, RemoteProtocolError, trio.TooSlowError) as error:
                reason = as_sentence(str(error) or type(error).__name__)
                if isinstance(due, RecomputationDue):
                    result = Recomputed(node_id, due.digest, None, reason, 0, is_conclusive=False)
                else:
                    result = ChallengeFailed(node_id, reason)
            self._core.command(result)
        raise AssertionError("the channel of challenges is never closed")

    async def _recompute(self, due: RecomputationDue) -> Recomputed:
        """What the rows are that an accusation rests on. Raises `KvasirError` where that cannot be found."""
        engine, record = self._holder.engine, self._core.record_of(due.node_id)
        if engine is None:
            raise EngineFailed("the worker engine is not running")
        if record is None or record.claim_digest() != due.claim_digest:
            raise TransportUnavailable("it does not claim any more what its rows were given under")
        request = RecomputeRows(
            request=engine.next_request(),
            manifest_path=str(self._model.manifest_path),
            source_path=str(self._model.source_path),
            evidence=due.evidence,
            adds_in_f32=record.adds_in_f32,
            activation=record.activation_format,
            programs=self._programs,
        )
        found = await engine.exchange(request, RowsRecomputed, CHALLENGE_TIMEOUT_S)
        log.info(
            "rows_recomputed",
            node=due.node_id,
            outcome=found.outcome,
            reason=found.reason,
            n_rows=found.n_rows,
        )
        return Recomputed(
            due.node_id,
            due.digest,
            found.outcome if found.outcome in ("unfit", "quarantined") else None,
            found.reason,
            found.n_rows,
            is_conclusive=found.outcome != "inconclusive",
        )

    async def _challenge(self, node_id: NodeId) -> ChallengeResult:
        """Raises `RemoteProtocolError` for what the other says, `KvasirError` where it cannot be done."""
        engine, record = self._holder.engine, self._core.record_of(node_id)
        if engine is None:
            raise EngineFailed("the worker engine is not running")
        if record is None or record.held is None or not record.verdicts:
            raise TransportUnavailable("it holds nothing any more")
        fence = self._core.view().fence
        if fence is None:
            raise TransportUnavailable("no term is followed")
        shard = self._experts_of(record)
        if self._experts is not None:  # before the grant, which does not last
            await self._experts.keep(shard, lambda done, total: None)
        proof = self._core.proof
        stream = await self._host.open_stream(node_id)
        try:
            grant = await ask(stream, DataRequest(engine.certificate, "worker", proof), DataGrant)
        finally:
            await stream.close()
        certificate = self._open_certificate(grant.tolerance_certificate, record)
        request = ChallengeHolder(
            request=engine.next_request(),
            node_id=node_id,
            host=grant.host,
            port=grant.port,
            token=grant.token,
            certificate=grant.engine_certificate,
            epoch=fence.epoch,
            term=fence.term,
            proof=proof,
            manifest_path=str(self._model.manifest_path),
            source_path=str(self._model.source_path),
            shard=shard.encode(),
            activation=self._activation_of(certificate, shard),
            seed=self._entropy.getrandbits(63),
        )
        found = await engine.exchange(request, HolderChallenged, CHALLENGE_TIMEOUT_S)
        log.info(
            "holder_challenged",
            node=node_id,
            outcome=found.outcome,
            reason=found.reason,
            n_rows=found.n_rows,
            n_flipped=found.n_flipped,
        )
        if found.outcome == "inconclusive":
            return ChallengeFailed(node_id, found.reason)
        ranks = {
            "verified": certificate.measured.fit,
            "unfit": _SENSITIVE,
            "quarantined": RANKS,
        }[found.outcome]
        if not ranks:
            raise RemoteProtocolError("its certificate shows it fit for nothing", "not_certified")
        return ChallengeDone(
            node_id=node_id,
            certificate=certificate.digest(),
            ranks=ranks,
            word=found.outcome,
            reason=found.reason,
            n_rows=found.n_rows,
            evidence=found.evidence,
        )

    def _open_certificate(self, data: bytes, record: CapabilityRecord) -> ToleranceCertificate:
        """The certificate that a node shows, if it is what its record speaks of."""
        certificate = open_certificate(data, self._swarm.digest, self._wall_time())
        measured = certificate.measured
        if certificate.node_id != record.node_id:
            raise RemoteProtocolError("it shows another node's certificate", "wrong_node")
        if measured.model_digest != self._model.manifest.digest():
            raise RemoteProtocolError("it was measured with another model", "wrong_model")
        if any(each.certificate != certificate.digest() for each in record.verdicts):
            raise RemoteProtocolError("its record speaks of another certificate", "wrong_certificate")
        if measured.kernel_classes != record.classes or measured.accumulation != record.accumulation:
            raise RemoteProtocolError("its record says something else than its certificate", "inconsistent")
        return certificate

    def _experts_of(self, record: CapabilityRecord) -> ShardSet:
        """Experts that it holds, drawn from all: of different layers, and of each kind of weights first."""
        assert record.held is not None
        manifest = self._model.manifest
        plan = self._core.view().plan
        if record.held.ranges is not None:
            held = ShardSet.decode(record.held.ranges)
        elif plan is not None:
            held = plan.shard_of(record.node_id)
        else:
            held = ShardSet()
        ranges = [each for each in held.ranges if _is_in(manifest, each)]
        if not ranges:
            raise TransportUnavailable("it holds nothing that is known here")
        self._entropy.shuffle(ranges)
        kinds: dict[tuple[str, ...], tuple[int, int, int]] = {}
        for each in ranges:
            kinds.setdefault(_types_of(manifest, each[0]), each)
        first = list(kinds.values())
        chosen = (first + [each for each in ranges if each not in first])[:EXPERTS_ASKED]
        experts = [(layer, self._entropy.randrange(first, end)) for layer, first, end in chosen]
        return ShardSet.from_ranges([(layer, expert, expert + 1) for layer, expert in experts])

    def _activation_of(self, certificate: ToleranceCertificate, shard: ShardSet) -> str:
        """How it claims to take rows for these experts' weights; empty for as the reference class does."""
        if "output" in certificate.measured.fit:
            return ""  # which only a kernel of the reference class is fit for
        types = {name for layer in shard.layers for name in _types_of(self._model.manifest, layer)}
        formats = {
            each.activation_format
            for each in certificate.measured.kernel_classes
            if types & {*each.weight_types}
        }
        if len(formats) != 1:
            raise RemoteProtocolError("it takes rows of one expert in several formats", "not_certified")
        return formats.pop()


def _is_in(manifest: ModelManifest, held: tuple[int, int, int]) -> bool:
    layer, _, end = held
    return layer in manifest.moe_layers and end <= manifest.n_expert


def _types_of(manifest: ModelManifest, layer: int) -> tuple[str, ...]:
    return tuple(sorted({each.type.name for each in manifest.expert_tensors(layer)}))
