"""llama.cpp with our hook and a swarm of kernels in this process: what the exactness tests drive."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.hook import ExpertHook, LayerCall
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.native_library import load
from kvasir_proto import dispatch
from kvasir_proto.dispatch import Answer, WireType
from kvasir_proto.manifest import ModelManifest, ShardSet

Rows = npt.NDArray[np.float32]


class Llama:
    """A model and one context through the low-level API: one thread, no repacking, no mmap."""

    def __init__(
        self,
        path: Path,
        hook: ExpertHook | None = None,
        *,
        n_ctx: int = 256,
        n_ubatch: int = 64,
        n_seq: int = 1,
        f32_cache: bool = True,
        flash_attention: bool = False,
        embeddings: bool = False,
        prediction_head: bool = False,
        watched_node: bytes = b"",
    ) -> None:
        """One context of the model at `path`.

        `embeddings`: rows are the last hidden states, not logits. `prediction_head`: run the layers that
        predict further tokens instead of the trunk. `watched_node`: ask llama.cpp to stop after the graph
        node of this name, as a debugger would.
        """
        import llama_cpp

        self._llama = llama_cpp
        _silence(llama_cpp)
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = False
        model_params.load_mode = 0
        model_params.load_mtp = prediction_head
        if hook is not None:
            hook.attach(model_params)
        self._context = None
        self._model = llama_cpp.llama_model_load_from_file(bytes(path), model_params)
        assert self._model, f"llama.cpp does not open {path.name}"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_ctx
        params.n_ubatch = n_ubatch
        params.n_seq_max = n_seq
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 1 if flash_attention else 0
        params.kv_unified = True
        if f32_cache:
            params.type_k = params.type_v = 0
        params.ctx_type = 1 if prediction_head else 0
        if embeddings:
            params.embeddings = True
            params.pooling_type = 0
        if watched_node:
            self._watcher = llama_cpp.ggml_backend_sched_eval_callback(_watcher_of(watched_node))
            params.cb_eval = self._watcher
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp makes no context of {path.name}"
        self._rows = llama_cpp.llama_get_embeddings if embeddings else llama_cpp.llama_get_logits
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.width = llama_cpp.llama_model_n_embd(self._model) if embeddings else self.n_vocab
        self.hidden_width = llama_cpp.llama_model_n_embd_out(self._model)

    def decode(
        self,
        tokens: Sequence[int],
        position: int,
        *,
        wanted: Sequence[bool] | None = None,
        sequences: Sequence[int] | None = None,
        hidden: Rows | None = None,
    ) -> tuple[int, Rows]:
        """(llama_decode's code, rows of the wanted positions). Sequence s starts at `position` too.

        `hidden`: for a prediction head, the trunk's hidden states [tokens, hidden width].
        """
        llama_cpp = self._llama
        wanted = wanted if wanted is not None else [True] * len(tokens)
        sequences = sequences if sequences is not None else [0] * len(tokens)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        next_position: dict[int, int] = {}
        try:
            batch.n_tokens = len(tokens)
            if hidden is not None:
                batch.embd = hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            for i, (token, want, sequence) in enumerate(zip(tokens, wanted, sequences, strict=True)):
                batch.token[i] = token
                batch.pos[i] = next_position.setdefault(sequence, position)
                next_position[sequence] += 1
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = want
            code = llama_cpp.llama_decode(self._context, batch)
            if code != 0:
                return code, np.zeros((0, self.width), np.float32)
            rows = self._rows(self._context)
            return 0, np.ctypeslib.as_array(rows, (sum(wanted), self.width)).copy()
        finally:
            batch.embd = None  # lent
            llama_cpp.llama_batch_free(batch)

    def run(self, tokens: Sequence[int], chunks: Sequence[int]) -> Rows:
        """Rows of all positions, decoded in chunks of these sizes."""
        rows = []
        position = 0
        for size in chunks:
            code, logits = self.decode(tokens[position : position + size], position)
            assert code == 0, f"llama_decode gave {code}"
            rows.append(logits)
            position += size
        assert position == len(tokens)
        return np.concatenate(rows)

    def last_position(self, sequence: int = 0) -> int:
        """The last position in the cache, or -1."""
        memory = self._llama.llama_get_memory(self._context)
        return int(self._llama.llama_memory_seq_pos_max(memory, sequence))

    def close(self) -> None:
        """Free context and model."""
        if self._context:
            self._llama.llama_free(self._context)
        if self._model:
            self._llama.llama_model_free(self._model)
        self._context = self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shards_of(manifest: ModelManifest, n_worker: int) -> list[ShardSet]:
    """The model's experts dealt out one by one, so that neighbours live apart and sizes are odd."""
    return [
        ShardSet.from_pairs(
            (layer, expert)
            for layer in manifest.moe_layers
            for expert in range(manifest.n_expert)
            if (expert + layer) % n_worker == worker
        )
        for worker in range(n_worker)
    ]


class InProcessWorkers:
    """Kernels with a shard each, and the callback that dispatches to them as a backbone would."""

    def __init__(self, path: Path, manifest: ModelManifest, shards: Sequence[ShardSet]) -> None:
        self.native = load()
        self.n_expert = manifest.n_expert
        self.kernels: list[GgmlCpuKernel] = []
        with ExpertSource(path, manifest) as source:
            for shard in shards:
                self.kernels.append(GgmlCpuKernel(manifest, shard, source.read))
        self.holder_of = {
            layer: np.array(
                [
                    next((i for i, shard in enumerate(shards) if (layer, expert) in shard), -1)
                    for expert in range(manifest.n_expert)
                ],
                np.int32,
            )
            for layer in manifest.moe_layers
        }
        self.hook: ExpertHook | None = None
        self.layers: list[int] = []
        self.summed_layers: list[int] = []
        self.widest = 0

    def __call__(self, call: LayerCall) -> None:
        """Dispatch one layer."""
        assert self.hook is not None
        self.layers.append(call.layer)
        program = self.hook.programs[call.program_index]
        assert call.x_rows == call.n_tokens * (call.n_slots if program.input_per_slot else 1)
        n_pairs = call.n_tokens * call.n_slots
        self.widest = max(self.widest, n_pairs)
        pairs = np.empty(n_pairs, np.int32)
        answer = Answer.SUMS if call.weights_address else Answer.ROWS
        if answer is Answer.SUMS:
            self.summed_layers.append(call.layer)
        frame_bytes = dispatch.HEADER_BYTES + dispatch.dispatch_payload_bytes(
            n_pairs, n_pairs, call.n_embd_in, answer=answer
        )
        frames = np.empty((len(self.kernels), frame_bytes), np.uint8)
        parts = np.zeros((len(self.kernels), 4), np.int64)  # kvasir_holder_part
        parts[:, 0] = [frame.ctypes.data for frame in frames]
        parts[:, 1] = frame_bytes
        authority = np.zeros(2, np.uint64)
        status = self.native.pack_call(
            ctypes.addressof(call),
            program.input_per_slot,
            WireType.F32,
            authority.ctypes.data,
            self.holder_of[call.layer].ctypes.data,
            self.n_expert,
            len(self.kernels),
            None,
            n_pairs,
            pairs.ctypes.data,
            parts.ctypes.data,
        )
        assert status == 0
        start = 0
        kept: list[Rows] = []
        sums_parts: list[tuple[int, int, int]] = []  # kvasir_sums_part
        for kernel, (frame, _, count, n_rows) in zip(self.kernels, parts.tolist(), strict=True):
            mine = pairs[start : start + count]
            if count:
                payload = frame + dispatch.HEADER_BYTES
                rows = self._compute(call, kernel, payload, count, n_rows, answer)
                if answer is Answer.SUMS:
                    kept.append(self._added_up(rows, payload, n_rows))
                    sums_parts.append((kept[-1].ctypes.data, mine.ctypes.data, count))
                else:
                    bad = self.native.scatter_rows(
                        rows.ctypes.data, mine.ctypes.data, count, call.n_embd_out, call.out_address
                    )
                    assert bad == -1
            start += count
        if sums_parts:
            array = np.array(sums_parts, np.int64)
            fault = self.native.add_sums(
                *(array.ctypes.data, len(array), call.n_tokens, call.n_slots, call.n_embd_out),
                call.out_address,
            )
            assert fault == -1

    def _compute(
        self,
        call: LayerCall,
        kernel: GgmlCpuKernel,
        payload_address: int,
        n_pairs: int,
        n_rows: int,
        answer: Answer,
    ) -> Rows:
        assert self.hook is not None
        number = kernel.add_program(self.hook.programs[call.program_index])
        assert kernel.row_widths(call.layer, number) == (call.n_embd_in, call.n_embd_out)
        out = np.empty((n_pairs, call.n_embd_out), np.float32)
        kernel.compute(
            call.layer,
            number,
            n_rows,
            n_pairs,
            payload_address + dispatch.tables_bytes(n_pairs, answer),
            payload_address,
            payload_address + 4 * n_pairs,
            out.ctypes.data,
        )
        return out

    def _added_up(self, rows: Rows, payload_address: int, n_rows: int) -> Rows:
        """What a worker would answer to a dispatch that asks for sums."""
        n_pairs, width = rows.shape
        sums = np.empty((n_rows, width), np.float32)
        fault = self.native.weighted_sums(
            *(rows.ctypes.data, payload_address, payload_address + 8 * n_pairs, n_pairs, n_rows, width),
            sums.ctypes.data,
        )
        assert fault == -1
        return sums

    def close(self) -> None:
        """Free the kernels."""
        for kernel in self.kernels:
            kernel.close()


def hooked(on_layer: Callable[[LayerCall], None], sum_layers: Sequence[int] = ()) -> ExpertHook:
    """A hook for `on_layer`, which learns of it when it wants to."""
    hook = ExpertHook(on_layer, sum_layers)
    if isinstance(on_layer, InProcessWorkers):
        on_layer.hook = hook
    return hook


def _watcher_of(name: bytes) -> Callable[[int, bool, int], bool]:
    """A cb_eval that asks for one node, and goes on after it."""
    name_offset = 256  # of ggml_tensor.name

    def watch(tensor: int, ask: bool, _: int) -> bool:
        return not ask or ctypes.string_at(tensor + name_offset) == name

    return watch


_callbacks: list[object] = []


def _silence(llama_cpp: object) -> None:
    if not _callbacks:
        import llama_cpp as library

        @library.llama_log_callback  # type: ignore[untyped-decorator]
        def nothing(level: int, text: bytes, _: ctypes.c_void_p) -> None:
            pass

        _callbacks.append(nothing)
        library.llama_log_set(nothing, ctypes.c_void_p())
