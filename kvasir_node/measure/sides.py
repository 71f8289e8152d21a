"""The sides of a comparison: a kernel in this process, llama.cpp, a swarm of engines, a running one, a saved.

Decides what each name means and makes all of them answer the same three questions: what are the logits of
these tokens, how does this text go on, and what was seen inside. It refuses to compare.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, get_args

import trio

from kvasir_node.backbone.traces import Rows, Traces
from kvasir_node.local_swarm import (
    CONNECT_TIMEOUT_S,
    RunSettings,
    continue_tokens,
    evaluate_logits,
    start_local_swarm,
)
from kvasir_node.locations import Locations, locate
from kvasir_node.measure.backends_here import Backend
from kvasir_node.measure.engine_answers import answers_in
from kvasir_node.measure.in_process import (
    Continuation,
    InProcessModel,
    KernelExperts,
    ModelSettings,
)
from kvasir_node.measure.live_side import open_live_side
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.supervisor import Engine
from kvasir_proto.errors import UsageError
from kvasir_proto.limits import WORKERS_MAX, Kernel
from kvasir_proto.messages.engine import Tokenize, Tokenized
from kvasir_proto.sampling import Sampling

LLAMA_CPP: Final = "llama.cpp"
SWARM: Final = "swarm"
SAVED: Final = "saved:"
LIVE: Final = "live"

_GREEDY: Final = Sampling(temperature=0.0)
_USUAL_WORKERS: Final[tuple[Kernel, ...]] = ("ggml-cpu", "ggml-cpu")


class OpenSide(Protocol):
    """A side that answers. Each text begins in an empty context."""

    name: str

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """The model's tokens of a text."""

    async def evaluate(
        self, tokens: Sequence[int], chunk_sizes: Sequence[int], *, looks_inside: bool = True
    ) -> tuple[Rows, Traces | None]:
        """Logits of every position, decoded in these chunks, and what was seen inside, if anything.

        What is inside may be had without ``looks_inside`` too, where it costs nothing.
        """

    async def greedy(self, tokens: Sequence[int], n_tokens: int) -> Continuation:
        """The most likely continuation."""


@dataclass(frozen=True, slots=True)
class SideSettings:
    """What both sides have in common."""

    model: ModelSettings
    home: Locations
    is_watched: bool = True


def is_swarm(name: str) -> bool:
    """Whether a name means engine processes of this measurement's own."""
    return name == SWARM or name.startswith(f"{SWARM}:")


def is_live(name: str) -> bool:
    """Whether a name means a running daemon's swarm."""
    return name == LIVE or name.startswith(f"{LIVE}:")


def home_of(name: str, home: Locations) -> Locations:
    """Whose daemon `live` or `live:HOME` means. Raises `UsageError` for an empty home."""
    if name == LIVE:
        return home
    directory = name.removeprefix(f"{LIVE}:")
    if not directory:
        raise UsageError(f"{LIVE}: takes the home of a daemon behind the colon")
    return locate(Path(directory), {})


def workers_of(name: str) -> tuple[Kernel, ...]:
    """What a swarm's workers compute with: two of ggml's own, or as `swarm:ggml-cpu+opencl` says.

    Raises `UsageError` for a kernel that no worker knows.
    """
    named = name.removeprefix(SWARM).removeprefix(":")
    if not named:
        return _USUAL_WORKERS
    kernels = get_args(Kernel)
    parts = named.split("+")
    unknown = next((part for part in parts if part not in kernels), None)
    if unknown is not None or len(parts) > WORKERS_MAX:
        raise UsageError(
            f"a swarm's workers are named as in {SWARM}:ggml-cpu+opencl, of {', '.join(kernels)}, and not "
            f"{unknown or len(parts)!r}"
        )
    return tuple(kernel for part in parts for kernel in kernels if kernel == part)


def check_side(name: str, backends: Sequence[Backend]) -> None:
    """Raise `UsageError` for a name that means no side here."""
    if is_swarm(name):
        workers_of(name)
        return
    if is_live(name):
        return
    known = [LLAMA_CPP, *(each.name for each in backends)]
    if name not in known and not name.startswith(SAVED):
        raise UsageError(
            f"there is no {name!r} here: there are {', '.join(known)}, {SWARM}, {SWARM}:KERNEL+KERNEL, "
            f"{LIVE}, {LIVE}:HOME and {SAVED}DIRECTORY"
        )


@contextlib.asynccontextmanager
async def open_side(
    name: str,
    model: StoredModel,
    settings: SideSettings,
    backends: Sequence[Backend],
    directory: Path,
) -> AsyncIterator[OpenSide]:
    """Load what a name means; closed with the context. ``directory`` is private and for this side alone.

    Raises `UsageError` for an unknown name, and what loading raises.
    """
    check_side(name, backends)
    if is_swarm(name):
        async with _open_swarm(name, model, settings, directory) as swarm:
            yield swarm
        return
    if is_live(name):
        locations = home_of(name, settings.home)
        n_ubatch, is_watched = settings.model.n_ubatch, settings.is_watched
        async with open_live_side(name, locations, model, directory, n_ubatch, is_watched=is_watched) as live:
            yield live
        return
    make = next((each.make for each in backends if each.name == name), None)

    def load() -> InProcessModel:
        experts = None if make is None else KernelExperts(model, make)
        return InProcessModel(model, settings.model, experts, is_watched=settings.is_watched)

    loaded = await trio.to_thread.run_sync(load)
    try:
        yield _InProcessSide(name, loaded)
    finally:
        loaded.close()


class _InProcessSide:
    """A model in this process, computing in other threads, so that a signal is heard meanwhile."""

    def __init__(self, name: str, model: InProcessModel) -> None:
        self.name = name
        self._model = model

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return await trio.to_thread.run_sync(self._model.tokenize, text)

    async def evaluate(
        self, tokens: Sequence[int], chunk_sizes: Sequence[int], *, looks_inside: bool = True
    ) -> tuple[Rows, Traces | None]:
        return await trio.to_thread.run_sync(self._model.evaluate, tokens, chunk_sizes)

    async def greedy(self, tokens: Sequence[int], n_tokens: int) -> Continuation:
        return await trio.to_thread.run_sync(self._model.greedy, tokens, n_tokens)


@contextlib.asynccontextmanager
async def _open_swarm(
    name: str, model: StoredModel, settings: SideSettings, directory: Path
) -> AsyncIterator[OpenSide]:
    run_settings = RunSettings(
        n_ctx=settings.model.n_ctx,
        n_ubatch=settings.model.n_ubatch,
        n_threads=settings.model.n_threads,
        kv_type=settings.model.kv_type,
    )
    async with open_unwrapping_nursery() as nursery:
        kernels = workers_of(name)
        # One holder each, so that every kernel computes its part.
        swarm = await start_local_swarm(
            nursery, model, run_settings, directory, n_workers=len(kernels), holders=1, kernels=kernels
        )
        yield _SwarmSide(name, swarm.backbone, directory, is_watched=settings.is_watched)
        for engine in (swarm.backbone, *swarm.workers):
            await engine.close()


class _SwarmSide:
    """A backbone engine and its workers, real processes with real connections."""

    def __init__(self, name: str, backbone: Engine, directory: Path, *, is_watched: bool) -> None:
        self.name = name
        self._backbone = backbone
        self._path = directory / "evaluated.npy"
        self._traces_path = directory / "traces.npz" if is_watched else None

    async def tokenize(self, text: str) -> tuple[int, ...]:
        request = Tokenize(self._backbone.next_request(), text)
        return (await self._backbone.exchange(request, Tokenized, CONNECT_TIMEOUT_S)).token_ids

    async def evaluate(
        self, tokens: Sequence[int], chunk_sizes: Sequence[int], *, looks_inside: bool = True
    ) -> tuple[Rows, Traces | None]:
        traces_path = self._traces_path if looks_inside else None
        await evaluate_logits(
            self._backbone, tuple(tokens), tuple(chunk_sizes), self._path, traces_path=traces_path
        )
        return await trio.to_thread.run_sync(answers_in, self._path, traces_path)

    async def greedy(self, tokens: Sequence[int], n_tokens: int) -> Continuation:
        found = await continue_tokens(self._backbone, tuple(tokens), n_tokens, sampling=_GREEDY)
        return Continuation(found.tokens)
