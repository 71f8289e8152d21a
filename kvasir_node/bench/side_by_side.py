"""The benchmark: one process beside a swarm of one worker and a swarm of two, in interleaved rounds.

Decides how the comparison is made: all engines stay alive, one ggml thread a process, mutual TLS and
deadlines as in service, every logit compared in every round. Where there is a server of llama.cpp's RPC
backend, that is one mode more: the same loop in an engine of the same kind, its experts in the server. It
prints nothing; the arithmetic of the figures is in `rounds`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from kvasir_node.bench.rounds import (
    ONE_WORKER,
    REFERENCE,
    RPC,
    TWO_WORKERS,
    Round,
    Sample,
    order_of,
)
from kvasir_node.bench.rpc_server import RpcServerProcess, run_rpc_server
from kvasir_node.local_swarm import (
    RunSettings,
    evaluate_logits,
    start_local_swarm,
    start_reference,
)
from kvasir_node.measure.statistics import largest_delta
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.supervisor import Engine
from kvasir_proto.errors import EngineFailed, ModelUnusable

ROUNDS_MIN: Final = 3
"""Rounds that are run however long they take: fewer give no median."""

BLOCK_TOKENS: Final = 48
"""Tokens decoded in one mode before the next has its turn: long enough for caches and clocks to be those of a
session, short enough for a noisy host to meet all modes alike.
"""

EVALUATE_TIMEOUT_S: Final = 600.0
"""For one prompt or block of tokens in one mode: far more than a machine needs that is fit for this."""

_N_THREADS: Final = 1
_SEED: Final = 20_261_129
_WORKERS_OF_MODE: Final = {ONE_WORKER: 1, TWO_WORKERS: 2}


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How much is measured. `time_limit_s` bounds the rounds, not what goes before them."""

    n_rounds: int = 9
    n_decode: int = 48
    n_prefill: int = 256
    time_limit_s: float = 180.0


@dataclass(frozen=True, slots=True)
class BenchRun:
    """What was measured; `backbone_rss_bytes` is the backbone with one worker, after its rounds.

    `deltas` has each mode's largest difference of a logit from the reference's.
    """

    rounds: tuple[Round, ...]
    n_moe_layer: int
    deltas: Mapping[str, float]
    rows_retried: int
    backbone_rss_bytes: int

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that ran, the reference first."""
        return (REFERENCE, *self.deltas)

    @property
    def max_abs_delta(self) -> float:
        """The largest difference of a swarm's logit from the reference's."""
        return max(self.deltas[mode] for mode in _WORKERS_OF_MODE)


@dataclass(frozen=True, slots=True)
class RpcProgram:
    """llama.cpp's RPC server, a program, and the client library that goes with it."""

    server: Path
    library: Path


@dataclass(frozen=True, slots=True)
class _Mode:
    """The processes of one mode, the one that is spoken to first."""

    backbone: Engine
    workers: tuple[Engine, ...] = ()
    rpc_server: RpcServerProcess | None = None

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What goes wrong inside is told by what became of the RPC server, where there is one."""
        try:
            yield
        except (EngineFailed, ModelUnusable) as error:
            raise error if self.rpc_server is None else self.rpc_server.failure_of_client(error) from error


@dataclass(frozen=True, slots=True)
class _Counters:
    """What a mode's processes have used so far."""

    backbone_cpu_ns: int
    workers_cpu_ns: int
    sent_bytes: int
    received_bytes: int


async def run_side_by_side(
    model: StoredModel,
    settings: BenchSettings,
    directory: Path,
    say: Callable[[str], None],
    rpc: RpcProgram | None = None,
) -> BenchRun:
    """Start every engine, run the rounds, end the engines. ``directory`` is private to this user.

    Needs about three times the model's size of memory, four times with ``rpc``. Raises what an engine
    reports, and what `run_rpc_server` does.
    """
    if rpc is None:
        return await _run(model, settings, directory, say, None)
    say("starting llama.cpp's RPC server")
    async with run_rpc_server(rpc.server, rpc.library, directory, n_threads=_N_THREADS) as server:
        return await _run(model, settings, directory, say, server)


async def _run(
    model: StoredModel,
    settings: BenchSettings,
    directory: Path,
    say: Callable[[str], None],
    rpc_server: RpcServerProcess | None,
) -> BenchRun:
    n_ctx = max(settings.n_prefill, settings.n_decode)
    run_settings = RunSettings(n_ctx=n_ctx, n_ubatch=min(n_ctx, 512), n_threads=_N_THREADS)
    async with open_unwrapping_nursery() as nursery:
        say("starting the single process")
        reference, trunk = await start_reference(nursery, model, run_settings, directory)
        modes = {REFERENCE: _Mode(reference)}
        for mode, n_workers in _WORKERS_OF_MODE.items():
            say(f"starting a swarm of {mode}")
            swarm = await start_local_swarm(
                nursery, model, run_settings, directory, n_workers=n_workers, holders=1
            )
            modes[mode] = _Mode(swarm.backbone, swarm.workers)
        if rpc_server is not None:
            say("loading the experts into llama.cpp's RPC server")
            try:
                engine, _ = await start_reference(
                    nursery, model, run_settings, directory, rpc=rpc_server.address
                )
            except (EngineFailed, ModelUnusable) as error:
                raise rpc_server.failure_of_client(error) from error
            modes[RPC] = _Mode(engine, rpc_server=rpc_server)
        bench = _Bench(modes, settings, directory, trunk.n_vocab)
        say("warming up")
        await bench.warm_up()
        rounds: list[Round] = []
        started = time.monotonic()
        while len(rounds) < settings.n_rounds:
            elapsed_s = time.monotonic() - started
            if len(rounds) >= ROUNDS_MIN and elapsed_s * (len(rounds) + 1) > settings.time_limit_s * len(
                rounds
            ):
                say(f"stopping after {len(rounds)} rounds: there is no time for more")
                break
            rounds.append(await bench.run_round(len(rounds)))
            say(f"round {len(rounds)} of {settings.n_rounds}: {_in_words(rounds[-1])}")
        rss_bytes = int((await _statistics(modes[ONE_WORKER].backbone))["resident_bytes"])
        for each in modes.values():
            for engine in (each.backbone, *each.workers):
                await engine.close()
        return BenchRun(
            rounds=tuple(rounds),
            n_moe_layer=len(model.manifest.moe_layers),
            deltas=bench.deltas,
            rows_retried=bench.rows_retried,
            backbone_rss_bytes=rss_bytes,
        )


class _Bench:
    """Runs the modes on the same tokens and holds each one's logits against the reference's."""

    def __init__(
        self, modes: Mapping[str, _Mode], settings: BenchSettings, directory: Path, n_vocab: int
    ) -> None:
        self._modes = modes
        self._settings = settings
        self._directory = directory
        draws = np.random.Generator(np.random.PCG64(_SEED))
        n_tokens = settings.n_prefill + settings.n_decode
        self._tokens = tuple(draws.integers(0, n_vocab, n_tokens).tolist())
        self.deltas = {mode: 0.0 for mode in modes if mode != REFERENCE}
        self.rows_retried = 0

    async def warm_up(self) -> None:
        """One prompt and a few tokens in every mode: programs are sent, buffers grown, pages touched."""
        for mode in self._modes:
            await self._evaluate(mode, "prefill", (self._settings.n_prefill,))
            await self._evaluate(mode, "decode", (1,) * min(BLOCK_TOKENS, self._settings.n_decode))

    async def run_round(self, index: int) -> Round:
        """One sample of every mode: the prompt, then blocks of tokens, the modes in this round's order."""
        order = order_of(tuple(self._modes), index)
        prefill_ns = {}
        for mode in order:
            (prefill_ns[mode],) = await self._evaluate(mode, "prefill", (self._settings.n_prefill,))
        await self._compare("prefill")
        before = {mode: await self._counters(mode) for mode in order}
        decode_ns: dict[str, list[int]] = {mode: [] for mode in order}
        for start in range(0, self._settings.n_decode, BLOCK_TOKENS):
            block = (1,) * min(BLOCK_TOKENS, self._settings.n_decode - start)
            for mode in order:
                decode_ns[mode].extend(await self._evaluate(mode, "decode", block))
            await self._compare("decode")
        after = {mode: await self._counters(mode) for mode in order}
        return {
            mode: Sample(
                decode_ns=tuple(decode_ns[mode]),
                prefill_ns=prefill_ns[mode],
                n_prefill=self._settings.n_prefill,
                backbone_cpu_ns=after[mode].backbone_cpu_ns - before[mode].backbone_cpu_ns,
                workers_cpu_ns=after[mode].workers_cpu_ns - before[mode].workers_cpu_ns,
                sent_bytes=after[mode].sent_bytes - before[mode].sent_bytes,
                received_bytes=after[mode].received_bytes - before[mode].received_bytes,
            )
            for mode in order
        }

    async def _compare(self, part: str) -> None:
        """Hold what the other modes just computed against what the reference did."""
        for mode in self.deltas:
            delta = await trio.to_thread.run_sync(
                largest_delta, self._logits_path(REFERENCE, part), self._logits_path(mode, part)
            )
            self.deltas[mode] = max(self.deltas[mode], delta)

    async def _evaluate(self, mode: str, part: str, chunk_sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Run tokens from an empty context and keep their logits in a file; the nanoseconds of each chunk."""
        first = 0 if part == "prefill" else self._settings.n_prefill
        tokens = self._tokens[first : first + sum(chunk_sizes)]
        path = self._logits_path(mode, part)
        with self._modes[mode].explained():
            evaluated = await evaluate_logits(
                self._modes[mode].backbone, tokens, chunk_sizes, path, EVALUATE_TIMEOUT_S
            )
        self.rows_retried += evaluated.rows_retried
        return evaluated.chunk_ns

    async def _counters(self, mode: str) -> _Counters:
        processes = self._modes[mode]
        with processes.explained():
            backbone = await _statistics(processes.backbone)
        workers = [int((await _statistics(each))["cpu_ns"]) for each in processes.workers]
        if processes.rpc_server is not None:
            workers.append(processes.rpc_server.cpu_ns())
        dispatch = backbone.get("dispatch", {})
        return _Counters(
            backbone_cpu_ns=int(backbone["cpu_ns"]),
            workers_cpu_ns=sum(workers),
            sent_bytes=int(dispatch.get("bytes_sent", 0)),
            received_bytes=int(dispatch.get("bytes_received", 0)),
        )

    def _logits_path(self, mode: str, part: str) -> Path:
        return self._directory / f"{mode.replace(' ', '-')}-{part}.npy"


async def _statistics(engine: Engine) -> dict[str, Any]:
    """An engine's counters."""
    values: dict[str, Any] = json.loads(await engine.statistics_json())
    return values


def _in_words(samples: Round) -> str:
    """A round for somebody who watches: milliseconds a token in each mode."""
    return ", ".join(f"{mode} {samples[mode].token_ns / 1e6:.2f} ms" for mode in samples) + " a token"
