"""A swarm of engine processes on this machine, without control processes: for measuring and benchmarks.

The engines, the pinned TLS connections, the plan and the dispatcher are the real ones; what is missing is
libp2p and membership, which have no part in a layer's arithmetic or its microseconds. This module plays
control for all engines at once. It decides nothing about what is measured.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.engine.lease import boottime_ns
from kvasir_node.model.store import StoredModel
from kvasir_node.supervisor import LOAD_TIMEOUT_S, Engine, load_trunk, start_engine
from kvasir_proto.errors import EngineFailed, ModelUnusable, error_of_session
from kvasir_proto.ids import NodeId, SessionId, SwarmDigest, node_id_of
from kvasir_proto.limits import Kernel
from kvasir_proto.messages.engine import (
    ConnectHolder,
    DiallerExpected,
    EvaluateLogits,
    ExpectDialler,
    Generate,
    HolderConnected,
    HolderLost,
    Listen,
    Listening,
    LoadShard,
    LoadTrunk,
    LogitsEvaluated,
    RpcServer,
    SessionEnded,
    SetFence,
    SetLease,
    ShardLoaded,
    TokenEmitted,
    Tokenize,
    Tokenized,
    TrunkLoaded,
)
from kvasir_proto.placement.plan import Plan, make_plan
from kvasir_proto.sampling import Sampling, SamplingOptions
from kvasir_proto.term_proof import (
    FOUNDING_EPOCH,
    FOUNDING_TERM,
    ProvenTerm,
    cast_vote,
    founding_electorate,
    make_term_proof,
)

CONNECT_TIMEOUT_S: Final = 30.0
EVALUATE_TIMEOUT_S: Final = 3600.0
_TOKEN_LIFETIME_NS: Final = 10_000_000_000
_LEASE_NS: Final = 24 * 3600 * 1_000_000_000
_HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a swarm and the reference beside it have in common; `audit` is the swarm's alone.

    Up to `sessions` decode together.
    """

    n_ctx: int = 1024
    n_ubatch: int = 256
    n_threads: int = 1
    kv_type: str = "f16"
    compact_activations: bool = False
    partial_sums: bool = False
    device: str = "none"
    audit: bool = False
    sessions: int = 1


@dataclass(frozen=True, slots=True)
class LocalSwarm:
    """A backbone engine whose experts live in ``workers``, all connected."""

    backbone: Engine
    backbone_id: NodeId
    workers: tuple[Engine, ...]
    worker_ids: tuple[NodeId, ...]
    plan: Plan
    trunk: TrunkLoaded


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole session on one engine: token ids, and the rate of decoding them."""

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    tokens_per_second: float


def _digest_for(key: Ed25519PrivateKey) -> SwarmDigest:
    """A swarm digest of this measurement's own, so that nothing signed in it means anything elsewhere."""
    return SwarmDigest(
        hashlib.sha256(b"kvasir local measurement" + key.public_key().public_bytes_raw()).digest()
    )


async def start_reference(
    nursery: trio.Nursery,
    model: StoredModel,
    settings: RunSettings,
    directory: Path,
    *,
    rpc: RpcServer | None = None,
) -> tuple[Engine, TrunkLoaded]:
    """The single-process run: one engine, plain llama.cpp, the whole model, no hook.

    With ``rpc``, llama.cpp has its routed experts computed by that server of its own.
    """
    key = Ed25519PrivateKey.generate()
    path = await trio.to_thread.run_sync(model.reference_path)
    engine = await start_engine(
        nursery, "backbone", node_key=key, swarm_digest=_digest_for(key), generation=1, directory=directory
    )
    trunk = await _load_trunk(engine, model, path, settings, hooked=False, rpc=rpc)
    await _grant_lease(engine)
    return engine, trunk


async def start_local_swarm(
    nursery: trio.Nursery,
    model: StoredModel,
    settings: RunSettings,
    directory: Path,
    *,
    n_workers: int,
    holders: int | None = None,
    kernels: Sequence[Kernel] = ("ggml-cpu",),
) -> LocalSwarm:
    """Start a backbone and ``n_workers`` workers, give each its shard, connect them all.

    ``holders`` is how many workers hold each expert; the default is the plan's own. ``kernels`` are what the
    workers compute with, in turn. Engines live at most as
    long as ``nursery``. Raises what an engine reports, or `EngineFailed`.
    """
    key = Ed25519PrivateKey.generate()
    swarm_digest = _digest_for(key)
    term = ProvenTerm(FOUNDING_EPOCH, FOUNDING_TERM, node_id_of(key.public_key().public_bytes_raw()))
    electorate = founding_electorate(key.public_key().public_bytes_raw())
    proof = make_term_proof(electorate, term, [cast_vote(key, swarm_digest, electorate, term)])
    backbone = await start_engine(
        nursery, "backbone", node_key=key, swarm_digest=swarm_digest, generation=1, directory=directory
    )
    worker_keys = [Ed25519PrivateKey.generate() for _ in range(n_workers)]
    worker_keys.sort(key=lambda each: node_id_of(each.public_key().public_bytes_raw()))
    worker_ids = tuple(node_id_of(each.public_key().public_bytes_raw()) for each in worker_keys)
    plan = make_plan(
        model.manifest.moe_layers,
        model.manifest.n_expert,
        worker_ids,
        epoch=term.epoch,
        term=term.term,
        revision=1,
        holders=holders,
    )
    path = await trio.to_thread.run_sync(model.verified_backbone_path)
    trunk = await _load_trunk(backbone, model, path, settings, hooked=True)
    await _grant_lease(backbone)
    workers: list[Engine] = []
    for worker_key, worker_id in zip(worker_keys, worker_ids, strict=True):
        worker = await start_engine(
            nursery,
            "worker",
            node_key=worker_key,
            swarm_digest=swarm_digest,
            generation=1,
            directory=directory,
        )
        kernel = kernels[len(workers) % len(kernels)]
        workers.append(worker)
        await _serve_shard(worker, model, plan, worker_id, settings, kernel)
        await _connect(backbone, term.backbone, worker, worker_id, plan, proof)
    return LocalSwarm(backbone, term.backbone, tuple(workers), worker_ids, plan, trunk)


async def evaluate_logits(
    engine: Engine,
    token_ids: tuple[int, ...],
    chunk_sizes: tuple[int, ...],
    output_path: Path,
    timeout_s: float = EVALUATE_TIMEOUT_S,
    traces_path: Path | None = None,
) -> LogitsEvaluated:
    """Run the tokens through in these chunks; the logits of every position end up in ``output_path``, what
    was seen inside in ``traces_path``, if there is one.
    """
    traces = None if traces_path is None else str(traces_path)
    request = EvaluateLogits(engine.next_request(), token_ids, chunk_sizes, str(output_path), traces)
    return await engine.exchange(request, LogitsEvaluated, timeout_s)


async def generate(engine: Engine, prompt: str, n_tokens: int, *, sampling: Sampling) -> Generation:
    """Run one session. Raises like `error_of_session` when it fails."""
    tokenized = await engine.exchange(Tokenize(engine.next_request(), prompt), Tokenized, CONNECT_TIMEOUT_S)
    return await continue_tokens(engine, tokenized.token_ids, n_tokens, sampling=sampling)


async def continue_tokens(
    engine: Engine, token_ids: tuple[int, ...], n_tokens: int, *, sampling: Sampling
) -> Generation:
    """Run one session that begins with these tokens. Raises like `error_of_session` when it fails."""
    session = SessionId(secrets.token_bytes(16))
    await engine.send(
        Generate(
            session=session,
            prompt=None,
            token_ids=token_ids,
            n_tokens=n_tokens,
            sampling=SamplingOptions(sampling),
            deadline_ms=int(EVALUATE_TIMEOUT_S * 1000),
        )
    )
    tokens = []
    async for event in engine.events:
        match event:
            case TokenEmitted() if event.session == session:
                tokens.append(event.token)
            case SessionEnded() if event.session == session:
                if event.reason == "failed":
                    raise error_of_session(event.code, event.detail)
                return Generation(token_ids, tuple(tokens), event.tokens_per_second)
            case _:
                pass  # what an engine says about holders is its dispatcher's to act on
    reason = await engine.wait_ended()
    raise engine.end_error(f"the engine ended: {reason}")


async def _load_trunk(
    engine: Engine,
    model: StoredModel,
    path: Path,
    settings: RunSettings,
    *,
    hooked: bool,
    rpc: RpcServer | None = None,
) -> TrunkLoaded:
    request = LoadTrunk(
        request=engine.next_request(),
        backbone_path=str(path),
        manifest_path=str(model.manifest_path),
        n_ctx=settings.n_ctx,
        n_ubatch=settings.n_ubatch,
        threads=settings.n_threads,
        hooked=hooked,
        kv_type="f32" if settings.kv_type == "f32" else "f16",
        compact_activations=settings.compact_activations,
        partial_sums=settings.partial_sums,
        coverage_patience_ns=0,
        audit_path=str(model.source_path) if hooked and settings.audit else None,
        device=settings.device,
        rpc=rpc,
        sessions=settings.sessions,
    )
    try:
        return await load_trunk(engine, request)
    except ModelUnusable as error:
        raise ModelUnusable(f"{model.source_path} cannot be used: {error}") from error


async def _grant_lease(engine: Engine) -> None:
    await engine.send(SetLease(FOUNDING_EPOCH, FOUNDING_TERM, boottime_ns() + _LEASE_NS))


async def _serve_shard(
    worker: Engine,
    model: StoredModel,
    plan: Plan,
    worker_id: NodeId,
    settings: RunSettings,
    kernel: Kernel = "ggml-cpu",
) -> None:
    await worker.send(SetFence(FOUNDING_EPOCH, FOUNDING_TERM))
    request = LoadShard(
        worker.next_request(),
        str(model.manifest_path),
        str(model.source_path),
        plan.shard_of(worker_id).encode(),
        settings.n_threads,
        kernel,
    )
    await worker.exchange(request, ShardLoaded, LOAD_TIMEOUT_S)


async def _connect(
    backbone: Engine, backbone_id: NodeId, worker: Engine, worker_id: NodeId, plan: Plan, proof: bytes
) -> None:
    listening = await worker.exchange(Listen(_HOST, 0), Listening, CONNECT_TIMEOUT_S)
    token = secrets.token_bytes(16)
    expect = ExpectDialler(
        token, backbone.certificate, "backbone", backbone_id, boottime_ns() + _TOKEN_LIFETIME_NS
    )
    await worker.exchange(expect, DiallerExpected, CONNECT_TIMEOUT_S, where=lambda each: each.token == token)
    request = ConnectHolder(
        node_id=worker_id,
        host=listening.host,
        port=listening.port,
        token=token,
        certificate=worker.certificate,
        shard=plan.shard_of(worker_id).encode(),
        primary=plan.primary_shard_of(worker_id).encode(),
        proof=proof,
    )
    reply = await backbone.exchange(
        request,
        (HolderConnected, HolderLost),
        CONNECT_TIMEOUT_S,
        where=lambda each: each.node_id == worker_id,
    )
    if isinstance(reply, HolderLost):
        raise EngineFailed(f"worker {worker_id} could not be connected: {reply.reason}")
