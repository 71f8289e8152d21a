"""A model in this process: llama.cpp's trunk with experts from any kernel, or llama.cpp alone, looked into.

Decides what is recorded while tokens go through: logits, the hidden state behind each layer, what each router
said and which experts it took. Without a kernel it is the plain llama.cpp run that everything is held to.
Apart from swarms of engine processes because those show logits only. It refuses to judge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from kvasir_node.backbone.hook import ExpertHook, LayerCall
from kvasir_node.backbone.traces import Numbers, Rows, TraceRecorder, Traces
from kvasir_node.backbone.trunk import Trunk, TrunkSettings
from kvasir_node.certification.synthetic_model import MakeKernel
from kvasir_node.engine.llama_log import capture_llama_log
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.store import StoredModel


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was generated, and how far each token's logit was ahead of the second; None where nobody saw."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What has to be equal on both sides of a comparison."""

    n_ctx: int = 512
    n_ubatch: int = 256
    n_threads: int = 1
    kv_type: str = "f32"
    flash_attention: bool = True


class Experts(Protocol):
    """Who supplies the routed experts' rows: a hook, and what is behind it."""

    hook: ExpertHook

    def close(self) -> None:
        """Free hook and kernels, after the trunk."""


class KernelExperts:
    """All routed experts of one model, computed by one kernel in this process."""

    def __init__(self, model: StoredModel, make: MakeKernel) -> None:
        """Load them. Raises as the kernel does, and `ModelUnusable` for bytes that are not the manifest's."""
        with ExpertSource(model.source_path, model.manifest) as source:
            self._kernel = make(model.manifest, model.manifest.whole_shard(), source.read)
        try:
            self.hook = ExpertHook(self.on_layer)
        except BaseException:
            self._kernel.close()
            raise

    def on_layer(self, call: LayerCall) -> None:
        """Fill one layer call's rows."""
        program_index = self._kernel.add_program(self.hook.programs[call.program_index])
        row_of_pair = rows_of_pairs(call)
        self._kernel.compute(
            call.layer,
            program_index,
            call.x_rows,
            len(row_of_pair),
            call.x_address,
            row_of_pair.ctypes.data,
            call.ids_address,
            call.out_address,
        )

    def close(self) -> None:
        """Free hook and kernel, after the trunk."""
        self.hook.close()
        self._kernel.close()


def rows_of_pairs(call: LayerCall) -> Numbers:
    """Which row each (token, slot) of a call takes."""
    n_pairs = call.n_tokens * call.n_slots
    pairs = np.arange(n_pairs, dtype=np.int32)
    return pairs if call.x_rows == n_pairs else pairs // np.int32(call.n_slots)


def load_vocabulary(model: StoredModel) -> Trunk:
    """The model without its weights: enough to tokenise as others do who run it. Raises `ModelUnusable`."""
    capture_llama_log()
    settings = TrunkSettings(n_ctx=256, n_ubatch=256, n_threads=1)
    return Trunk(model.verified_backbone_path(), settings, None, header_only=True)


class InProcessModel:
    """A model loaded in this process. A context manager; one thread drives it at a time."""

    def __init__(
        self,
        model: StoredModel,
        settings: ModelSettings,
        experts: Experts | None = None,
        *,
        is_watched: bool = True,
    ) -> None:
        """Load it; without ``experts`` llama.cpp computes everything. Closes ``experts`` with itself.

        Raises what loading raises.
        """
        capture_llama_log()
        self._experts = experts
        self._recorder = TraceRecorder() if is_watched else None
        path = model.reference_path() if experts is None else model.verified_backbone_path()
        trunk_settings = TrunkSettings(
            n_ctx=settings.n_ctx,
            n_ubatch=settings.n_ubatch,
            n_threads=settings.n_threads,
            kv_type=settings.kv_type,
            flash_attention=settings.flash_attention,
        )
        hook = None if experts is None else experts.hook
        try:
            watch = None if self._recorder is None else self._recorder.watch
            self._trunk = Trunk(path, trunk_settings, hook, watch=watch)
        except BaseException:
            if experts is not None:
                experts.close()
            raise
        self.n_vocab = self._trunk.n_vocab

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the trunk, then its experts."""
        self._trunk.close()
        if self._experts is not None:
            self._experts.close()

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The model's tokens of a text. Raises as `Trunk.tokenize`."""
        return tuple(self._trunk.tokenize(text))

    def evaluate(self, tokens: Sequence[int], chunk_sizes: Sequence[int]) -> tuple[Rows, Traces | None]:
        """One window from an empty context: logits [positions, vocabulary], and what was seen inside.

        Raises what a decode raises.
        """
        if self._recorder is not None:
            self._recorder.clear()
        self._trunk.clear()
        logits = np.empty((len(tokens), self.n_vocab), np.float32)
        start = 0
        for size in chunk_sizes:
            self._decode(tokens[start : start + size], all_logits=True)
            for index in range(size):
                logits[start + index] = self._trunk.logits(index)
            start += size
        return logits, None if self._recorder is None else self._recorder.traces(len(tokens))

    def greedy(self, tokens: Sequence[int], n_tokens: int) -> Continuation:
        """The most likely continuation; the lowest token wins a tie. Ends early where a text ends."""
        self._trunk.clear()
        self._decode(tokens)
        found: list[int] = []
        margins: list[float] = []
        while len(found) < n_tokens:
            logits = self._trunk.logits()
            token = int(np.argmax(logits))
            if self._trunk.is_end_of_generation(token):
                break
            second, first = np.partition(logits, -2)[-2:] if len(logits) > 1 else (-np.inf, logits[0])
            found.append(token)
            margins.append(float(first) - float(second))
            if len(found) < n_tokens:
                self._decode((token,))
        return Continuation(tuple(found), tuple(margins))

    def _decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> None:
        self._trunk.decode(tokens, all_logits=all_logits)
        if self._recorder is not None:
            self._recorder.require_seen()
