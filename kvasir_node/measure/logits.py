"""Level "end-to-end logits": the same tokens through one process and through a swarm, every logit compared.

Decides what has to be equal on both sides for the comparison to mean anything (DESIGN section 5): settings,
chunks, ubatches; and that the reference ends before the swarm starts, so that a model needs its memory once.
The swarm's engines, connections and plan are the real ones. It judges nothing: how far is too far is the
caller's question.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import trio

from kvasir_node.local_swarm import RunSettings, evaluate_logits, start_local_swarm, start_reference
from kvasir_node.measure.statistics import LogitsComparison, compare_logits, open_logits
from kvasir_node.model.backbone_file import expert_bytes_of
from kvasir_node.model.store import SPARE_BYTES, StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.supervisor import Engine
from kvasir_proto.errors import ModelUnusable, UsageError
from kvasir_proto.limits import CONTEXT_LENGTH_MAX

_CHUNK: Final = re.compile(r"(\d{1,6})(?:x(\d{1,6}))?", re.ASCII)
_CONTEXT_STEP: Final = 256


@dataclass(frozen=True, slots=True)
class LogitsSettings:
    """What is run. `chunk_sizes` are the tokens of each decode; they add up to the number of tokens.

    `device` is where the backbone computes all but routed experts, `reference_device` the same for the single
    process, whose routed experts stay with the processor.
    """

    token_ids: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    n_workers: int = 1
    holders: int = 1
    n_threads: int = 1
    n_ubatch: int = 512
    kv_type: str = "f16"
    compact_activations: bool = False
    partial_sums: bool = False
    device: str = "none"
    reference_device: str = "none"


@dataclass(frozen=True, slots=True)
class EngineSeen:
    """One engine process of the measurement: what it was and which experts it held."""

    role: str
    pid: int
    backend: str
    n_experts: int


@dataclass(frozen=True, slots=True)
class LogitsMeasurement:
    """The comparison, and what the swarm did for it. `ubatches` is how many llama.cpp made of the chunks.

    Bytes are those of frames, without what TLS and TCP add.
    The devices are those that the trunks were really on.
    """

    comparison: LogitsComparison
    hook_calls: int
    ubatches: int
    rows_retried: int
    bytes_to_holders: int
    bytes_from_holders: int
    experts_missing_total: int
    backbone_expert_bytes: int
    reference_device: str
    device: str
    processes: tuple[EngineSeen, ...]


def default_chunks(n_tokens: int) -> tuple[int, ...]:
    """The first half at once as a prompt, the rest token by token: both of llama.cpp's paths are covered."""
    n_prompt = (n_tokens + 1) // 2
    return (n_prompt, *(1 for _ in range(n_tokens - n_prompt)))


def parse_chunks(text: str, option: str) -> tuple[int, ...]:
    """Chunk sizes from a list such as ``256,64,1x32`` (one of 256, one of 64, thirty-two of 1).

    Raises `UsageError`, which names ``option``, for anything else.
    """
    sizes: list[int] = []
    for part in text.split(","):
        match = _CHUNK.fullmatch(part.strip())
        if match is None or int(match[1]) < 1 or (match[2] is not None and int(match[2]) < 1):
            raise UsageError(
                f"{option} takes numbers of tokens such as 256 or 1x32, separated by commas, not {part!r}"
            )
        count = int(match[2] or 1)
        if len(sizes) + count > CONTEXT_LENGTH_MAX:
            raise UsageError(f"{option} takes at most {CONTEXT_LENGTH_MAX} chunks")
        sizes += [int(match[1])] * count
    return tuple(sizes)


def count_ubatches(chunk_sizes: Sequence[int], n_ubatch: int) -> int:
    """How many pieces llama.cpp computes these chunks in."""
    return sum(-(-size // n_ubatch) for size in chunk_sizes)


def random_tokens(n_tokens: int, n_vocab: int, seed: int) -> tuple[int, ...]:
    """Token ids drawn evenly from a vocabulary; the same for the same arguments everywhere."""
    draws = np.random.Generator(np.random.PCG64(seed))
    return tuple(int(each) for each in draws.integers(0, max(1, n_vocab), n_tokens))


def check_tokens(token_ids: Sequence[int], n_vocab: int) -> None:
    """Raise `UsageError` for a token outside a vocabulary of this size; 0 is a size that nobody knows yet."""
    outside = next((token for token in token_ids if 0 < n_vocab <= token), None)
    if outside is not None:
        raise UsageError(f"token id {outside} is outside the vocabulary of {n_vocab}")


def require_space(directory: Path, n_tokens: int, n_vocab: int) -> None:
    """Raise `ModelUnusable` unless both files of logits fit: a full disk would kill the writing engine."""
    needed_bytes = 2 * 4 * n_tokens * n_vocab + SPARE_BYTES
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ModelUnusable(
            f"logits of {n_tokens} positions take {needed_bytes >> 20} MiB in {directory}, where "
            f"{free_bytes >> 20} MiB are free: measure fewer positions"
        )


async def measure_logits(
    model: StoredModel, settings: LogitsSettings, directory: Path, say: Callable[[str], None]
) -> LogitsMeasurement:
    """Run the reference, then the swarm, and compare. ``directory`` is private to this user.

    ``say`` is told what begins. Two files of F32 logits, positions x vocabulary, are written to
    ``directory``. Raises `UsageError` for a token outside the vocabulary, `ModelUnusable` without space for
    the logits, and what an engine reports.
    """
    n_tokens = len(settings.token_ids)
    run_settings = RunSettings(
        n_ctx=-(-n_tokens // _CONTEXT_STEP) * _CONTEXT_STEP,
        n_ubatch=settings.n_ubatch,
        n_threads=settings.n_threads,
        kv_type=settings.kv_type,
        compact_activations=settings.compact_activations,
        partial_sums=settings.partial_sums,
        device=settings.device,
    )
    reference_settings = dataclasses.replace(run_settings, device=settings.reference_device)
    base_path, run_path = directory / "reference.npy", directory / "swarm.npy"
    async with open_unwrapping_nursery() as nursery:
        say("the single process loads the whole model")
        reference, trunk = await start_reference(nursery, model, reference_settings, directory)
        check_tokens(settings.token_ids, trunk.n_vocab)
        require_space(directory, n_tokens, trunk.n_vocab)
        say(f"the single process computes {n_tokens} positions")
        await evaluate_logits(reference, settings.token_ids, settings.chunk_sizes, base_path)
        reference_device = json.loads(await reference.statistics_json())["trunk_device"]
        await reference.close()
    async with open_unwrapping_nursery() as nursery:
        say(f"a backbone and {settings.n_workers} worker(s) load their parts")
        swarm = await start_local_swarm(
            nursery,
            model,
            run_settings,
            directory,
            n_workers=settings.n_workers,
            holders=settings.holders,
        )
        say(f"the swarm computes {n_tokens} positions")
        evaluated = await evaluate_logits(swarm.backbone, settings.token_ids, settings.chunk_sizes, run_path)
        statistics = json.loads(await swarm.backbone.statistics_json())
        processes = [_seen(swarm.backbone, 0)]
        for worker, node_id in zip(swarm.workers, swarm.worker_ids, strict=True):
            processes.append(_seen(worker, len(swarm.plan.shard_of(node_id))))
        for engine in (swarm.backbone, *swarm.workers):
            await engine.close()
    say("comparing")
    comparison = await trio.to_thread.run_sync(
        lambda: compare_logits(open_logits(base_path), open_logits(run_path), settings.token_ids)
    )
    return LogitsMeasurement(
        comparison=comparison,
        hook_calls=evaluated.hook_calls,
        ubatches=count_ubatches(settings.chunk_sizes, settings.n_ubatch),
        rows_retried=evaluated.rows_retried,
        bytes_to_holders=int(statistics["dispatch"]["bytes_sent"]),
        bytes_from_holders=int(statistics["dispatch"]["bytes_received"]),
        experts_missing_total=int(statistics["experts_missing_total"]),
        backbone_expert_bytes=await trio.to_thread.run_sync(expert_bytes_of, model.backbone_path),
        reference_device=str(reference_device),
        device=str(statistics["trunk_device"]),
        processes=tuple(processes),
    )


def _seen(engine: Engine, n_experts: int) -> EngineSeen:
    return EngineSeen(role=engine.role, pid=engine.pid, backend=engine.backend, n_experts=n_experts)
