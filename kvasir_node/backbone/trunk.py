"""The trunk: everything of the model that is not a routed expert, run by unmodified llama.cpp.

One `Trunk` is one llama.cpp model with one context. With an `ExpertHook` it runs on a backbone file and the
hook supplies every MoE layer's expert rows; without one it is the single-process reference that the swarm is
measured against. Both are built by the same code with the same settings, because exactness holds only then
(DESIGN section 5): no extra buffer types, no mmap, explicit flash attention, explicit thread counts. On a
graphics processor the reference keeps its routed experts with the processor, whose kernels the workers use.
llama.cpp only ever opens files that Kvasir wrote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.graph_watch import GraphWatch
from kvasir_node.backbone.tensor_placement import place_tensors
from kvasir_node.engine.llama_log import forget_errors, name_model, why_it_failed
from kvasir_node.ggml_devices import NO_DEVICE, trunk_device
from kvasir_node.native_library import load_ggml
from kvasir_proto.errors import EngineFailed, ModelUnusable, NoHolderLeft, UsageError
from kvasir_proto.sessions.requests import CacheStep, ClearCache, CopySequence, ForgetSequence, Place

_KV_TYPES = {"f16": llama_cpp.GGML_TYPE_F16, "f32": llama_cpp.GGML_TYPE_F32}
_PIECE_BYTES_MAX = 512


@dataclass(frozen=True, slots=True)
class TrunkSettings:
    """What has to be equal between a swarm and its reference for the comparison to be exact."""

    n_ctx: int
    n_ubatch: int
    n_threads: int
    kv_type: str = "f16"
    device: str = NO_DEVICE
    """Where everything but the routed experts is computed: `ggml_devices.choose_device` reads it."""
    n_sequences: int = 1
    """Sequences that share the cells of the KV cache; more than one are driven by `Trunk.decode_places`."""
    flash_attention: bool = True
    """With it llama.cpp rounds keys and values to F16 whatever the cache holds."""


class ExpertSource(Protocol):
    """Who computes the routed experts in llama.cpp's place."""

    def attach(self, model_params: Any, trunk_device: int | None) -> None:
        """Change a `llama_cpp.llama_model_params` so that the model loaded with it asks this source."""

    def take_failure(self) -> BaseException | None:
        """Why this thread's last decode failed, once; None when the source had no part in it."""


class DecodeFailed(EngineFailed):
    """llama_decode failed and the experts' source had none to blame; `Trunk.position` says what is left."""


class Trunk:
    """A loaded model with one context. Not thread-safe: one thread drives it.

    `decode`, `clear` and `position` are of its only sequence; where it has several, `change_cache`,
    `decode_places` and `n_in_cache` take their place.
    """

    def __init__(
        self,
        path: Path,
        settings: TrunkSettings,
        experts: ExpertSource | None,
        *,
        header_only: bool = False,
        watch: GraphWatch | None = None,
    ) -> None:
        """Load ``path``; without ``experts`` llama.cpp computes the whole model.

        With ``header_only`` no tensor's bytes are loaded, and nothing can be decoded. ``watch`` is shown
        values of the graph as they are computed, on the processor only, and outlives the trunk. Raises
        `ModelUnusable`, with llama.cpp's reason, when it refuses the file or the context,
        `ConfigurationInvalid` when the device is not there.
        """
        self._experts = experts
        self.settings = settings
        device = trunk_device(settings.device)
        self.device_name = NO_DEVICE if device is None else device.name
        address = None if device is None else device.address
        parameters = llama_cpp.llama_model_default_params()
        parameters.no_alloc = header_only
        if experts is not None:
            experts.attach(parameters, address)
        else:
            on_processor = None if device is None else load_ggml().cpu_buffer_type()
            self._kept = place_tensors(parameters, trunk_device=address, expert_buffer_type=on_processor)
        forget_errors()
        name_model(str(path))
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ModelUnusable(f"llama.cpp could not load the model{why_it_failed()}")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._owns_model = True
        try:
            self._open_context(watch)
        except BaseException:
            llama_cpp.llama_model_free(self._model)
            raise

    def beside(
        self, n_ctx: int, n_ubatch: int, watch: GraphWatch | None = None, *, n_sequences: int = 1
    ) -> Trunk:
        """Another context of this model, which may show its values: close it before this trunk.

        Weights, all other settings and the experts' source are the same. It may be driven by another thread,
        where the experts' source allows for that. Raises `UsageError` for values of a
        device, `ModelUnusable` when the memory does not suffice for it.
        """
        other = object.__new__(Trunk)
        other._experts, other.device_name = self._experts, self.device_name
        other.settings = replace(
            self.settings, n_ctx=n_ctx, n_ubatch=min(n_ctx, n_ubatch), n_sequences=n_sequences
        )
        other._model, other._vocabulary, other._owns_model = self._model, self._vocabulary, False
        other._open_context(watch)
        return other

    def _open_context(self, watch: GraphWatch | None) -> None:
        settings = self.settings
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = settings.n_ctx
        context.n_batch = settings.n_ctx
        context.n_ubatch = settings.n_ubatch
        context.n_seq_max = settings.n_sequences
        # One cache for all of them: chunks of prompts and single tokens go through the layers together.
        context.kv_unified = settings.n_sequences > 1
        context.n_threads = settings.n_threads
        context.n_threads_batch = settings.n_threads
        context.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if settings.flash_attention
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        context.type_k = context.type_v = _KV_TYPES[settings.kv_type]
        context.no_perf = True
        # Or a graphics processor is lent the processor's experts for large batches, weights and all.
        context.op_offload = False
        if watch is not None:
            if self.device_name != NO_DEVICE:
                raise UsageError("values of the graph can be seen on the processor only")
            watch.attach(context)
        self._context: Any = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise ModelUnusable(
                f"llama.cpp could not make a context of {settings.n_ctx} tokens{why_it_failed()}"
            )
        if not llama_cpp.llama_get_memory(self._context):
            llama_cpp.llama_free(self._context)
            raise ModelUnusable("the model remembers no sequence: it does not write text token by token")
        self._has_states = bool(
            llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model)
        )
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocabulary))
        self.n_layer = int(llama_cpp.llama_model_n_layer(self._model))
        self.n_ctx = int(llama_cpp.llama_n_ctx(self._context))
        self.has_tokenizer = llama_cpp.llama_vocab_type(self._vocabulary) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        self._batch = llama_cpp.llama_batch_init(settings.n_ctx, 0, 1)
        self._position = 0

    @property
    def position(self) -> int:
        """The next position of the sequence, equal to the number of tokens decoded so far."""
        return self._position

    def clear(self) -> None:
        """Forget the sequence; the next decode starts at position 0."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._position = 0

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False, no_logits: bool = False) -> None:
        """Append ``tokens`` to the sequence in one llama_decode.

        Logits are kept for the last token, for all with ``all_logits``, for none with ``no_logits``. Raises
        what the experts' source raised, or `DecodeFailed`; then the ubatch that failed has left no trace,
        `position` says where the sequence stands, and the tokens from there may be sent again. A model with
        recurrent states cannot go back: there the whole sequence is forgotten and `position` is 0, so what
        can be retried has to be retried before llama_decode returns.
        """
        if not tokens:
            raise DecodeFailed("there is no token to decode")
        if self._position + len(tokens) > self.n_ctx:
            raise DecodeFailed(f"the context of {self.n_ctx} tokens is full")
        if any(not 0 <= token < self.n_vocab for token in tokens):
            raise DecodeFailed(f"a token id is outside the vocabulary of {self.n_vocab}")
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = self._position + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = all_logits
        if not no_logits:
            batch.logits[len(tokens) - 1] = True
        status = llama_cpp.llama_decode(self._context, batch)
        if status == 0:
            self._position += len(tokens)
            return
        forget_errors()
        self._recover()
        failure = self._experts.take_failure() if self._experts is not None else None
        if failure is not None:
            raise failure
        raise DecodeFailed(f"llama_decode failed with status {status}")

    def _recover(self) -> None:
        """After a failed decode: find where the sequence stands, or forget it when nobody can say.

        llama.cpp removes the failed ubatch's positions, and does not tell when the model's memory refuses:
        its states are then half those of before and half those of after.
        """
        memory = llama_cpp.llama_get_memory(self._context)
        end = int(llama_cpp.llama_memory_seq_pos_max(memory, 0)) + 1
        if self._has_states and end != self._position:
            self.clear()
        else:
            self._position = end

    # -- several sequences -------------------------------------------------------------------------

    def change_cache(self, step: CacheStep) -> None:
        """Forget a sequence or all of them, or let one begin with another's tokens."""
        memory = llama_cpp.llama_get_memory(self._context)
        match step:
            case ClearCache():
                self.clear()
            case ForgetSequence(sequence):
                llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
            case CopySequence(source, target, n_tokens):
                llama_cpp.llama_memory_seq_cp(memory, source, target, 0, n_tokens)

    @property
    def can_share_prefixes(self) -> bool:
        """Whether a sequence can begin with a part of another one: recurrent states know no parts."""
        return not self._has_states

    def n_in_cache(self, sequence: int) -> int:
        """Tokens of a sequence from its first on."""
        memory = llama_cpp.llama_get_memory(self._context)
        return int(llama_cpp.llama_memory_seq_pos_max(memory, sequence)) + 1

    def decode_places(self, places: Sequence[Place]) -> None:
        """Decode one ubatch of tokens of several sequences; those of one lie side by side.

        `logits` then takes the index of a place that is sampled. Raises as `decode` does; of the ubatch
        nothing is left in the cache then, and where states could not go back nothing of its sequences:
        `n_in_cache` says what is. A `NoHolderLeft` names places in `tokens`, or none.
        """
        if not 1 <= len(places) <= self.n_ctx:
            raise DecodeFailed(f"a ubatch of {len(places)} tokens in a context of {self.n_ctx}")
        if any(not 0 <= each.token < self.n_vocab for each in places):
            raise DecodeFailed(f"a token id is outside the vocabulary of {self.n_vocab}")
        begins = {each.sequence: each.position for each in reversed(places)}
        batch = self._batch
        batch.n_tokens = len(places)
        for index, place in enumerate(places):
            batch.token[index] = place.token
            batch.pos[index] = place.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = place.sequence
            batch.logits[index] = place.is_sampled
        status = llama_cpp.llama_decode(self._context, batch)
        if status == 0:
            return
        forget_errors()
        failure = self._experts.take_failure() if self._experts is not None else None
        for sequence, begin in begins.items():
            if self._has_states and self.n_in_cache(sequence) != begin:
                self.change_cache(ForgetSequence(sequence))
        if isinstance(failure, NoHolderLeft):
            raise NoHolderLeft(str(failure), self._places_of(failure, places)) from failure
        raise failure or DecodeFailed(f"llama_decode failed with status {status}")

    def _places_of(self, failure: NoHolderLeft, places: Sequence[Place]) -> frozenset[int]:
        """The places that a layer call's tokens are of.

        A layer is computed for all places, or, where only logits follow, for those that are sampled. Whether
        llama.cpp cut the ubatch, as it does for states, and in what order, does not show.
        """
        sampled = [index for index, each in enumerate(places) if each.is_sampled]
        if self._has_states:
            return frozenset()
        if failure.n_tokens == len(places):
            return failure.tokens
        if failure.n_tokens == len(sampled):
            return frozenset(sampled[each] for each in failure.tokens)
        return frozenset()

    def logits(self, index: int = -1) -> npt.NDArray[np.float32]:
        """Logits of the batch's output ``index``, shape [n_vocab]; a view valid until the next decode."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        if not pointer:
            raise DecodeFailed("no logits were requested for that position")
        return np.ctypeslib.as_array(pointer, shape=(self.n_vocab,))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text`` by the model's own beginning-of-text rule; special tokens are not parsed.

        Raises `UsageError` for a model without a tokenizer, `ModelUnusable` when it does not take the text.
        """
        if not self.has_tokenizer:
            raise UsageError("this model has no tokenizer: give token ids")
        data = text.encode()
        capacity = len(data) + 8
        tokens = (llama_cpp.llama_token * capacity)()
        count = llama_cpp.llama_tokenize(self._vocabulary, data, len(data), tokens, capacity, True, False)
        if count < 0:
            raise ModelUnusable("the tokenizer did not accept the text")
        return list(tokens[:count])

    def piece(self, token: int) -> bytes:
        """The bytes of ``token``, at times part of a UTF-8 sequence; empty without a tokenizer."""
        if not self.has_tokenizer:
            return b""
        buffer = ctypes.create_string_buffer(_PIECE_BYTES_MAX)
        count = llama_cpp.llama_token_to_piece(self._vocabulary, token, buffer, _PIECE_BYTES_MAX, 0, False)
        return buffer.raw[: max(0, int(count))]

    def is_end_of_generation(self, token: int) -> bool:
        """Whether ``token`` ends a text."""
        return self.has_tokenizer and bool(llama_cpp.llama_vocab_is_eog(self._vocabulary, token))

    def close(self) -> None:
        """Free context, model and batch; the hook may be closed after."""
        if self._context:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self._context)
            self._context = None
        if self._model and self._owns_model:
            llama_cpp.llama_model_free(self._model)
        self._model = None
