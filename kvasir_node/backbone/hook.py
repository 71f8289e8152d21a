"""The hook: llama.cpp's MoE layers, one Python call each, with their expert programs.

Decides how a model is loaded so that routed experts take no memory (`attach`), and turns each sub-graph that
the scheduler hands to the native device into one `LayerCall`. Who computes the rows is the callback's affair.
Apart from the trunk because it is the only place that touches ggml's internals. It refuses to know networks,
shards and sessions, and looks at no architecture's name.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, overload

from kvasir_node.backbone.tensor_placement import place_tensors
from kvasir_node.engine.llama_log import expect_errors
from kvasir_node.native_library import (
    LAYER_ABORTED,
    LAYER_DONE,
    LAYER_FAILED,
    LayerCallback,
    NativeLibrary,
    load,
)
from kvasir_proto.errors import EngineFailed, LocalProtocolError
from kvasir_proto.program import ExpertProgram, program_of_flat


class DecodeAborted(Exception):
    """Raise it in the callback to stop the decode: llama_decode returns 2 instead of -3."""


class LayerCall(ctypes.Structure):
    """One MoE layer of one ubatch, valid only during the callback. Addresses are of host memory.

    `x_address`: F32 [x_rows, n_embd_in], a copy; x_rows is n_tokens, or n_tokens * n_slots where the program
    has `input_per_slot`. `ids_address`: I32 [n_tokens, n_slots], a copy. All contiguous, and the output is to
    be filled completely. `weights_address` is 0 where a row is asked for each slot: `out_address` is then
    F32 [n_tokens, n_slots, n_embd_out]. Where weighted sums are asked for it is F32 [n_tokens, n_slots], a
    copy, and the output is F32 [n_tokens, n_embd_out].
    """

    _fields_ = (
        ("layer", ctypes.c_int32),
        ("program_index", ctypes.c_int32),
        ("n_tokens", ctypes.c_int32),
        ("n_slots", ctypes.c_int32),
        ("n_embd_in", ctypes.c_int32),
        ("n_embd_out", ctypes.c_int32),
        ("x_rows", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("x_address", ctypes.c_uint64),
        ("ids_address", ctypes.c_uint64),
        ("out_address", ctypes.c_uint64),
        ("weights_address", ctypes.c_uint64),
    )

    layer: int
    program_index: int
    n_tokens: int
    n_slots: int
    n_embd_in: int
    n_embd_out: int
    x_rows: int
    x_address: int
    ids_address: int
    out_address: int
    weights_address: int


def fill_with_zeros(call: LayerCall) -> None:
    """Answer a layer call as experts would whose rows are all zeros: for trials, never for a token."""
    n_rows = call.n_tokens if call.weights_address else call.n_tokens * call.n_slots
    ctypes.memset(call.out_address, 0, 4 * n_rows * call.n_embd_out)


class _ProgramTable(Sequence[ExpertProgram]):
    """The programs seen so far; fetched from the native table when it has grown."""

    def __init__(self, native: NativeLibrary, handle: Callable[[], int]) -> None:
        self._native = native
        self._handle = handle
        self._programs: list[ExpertProgram] = []

    @overload
    def __getitem__(self, index: int) -> ExpertProgram: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ExpertProgram]: ...
    def __getitem__(self, index: int | slice) -> ExpertProgram | Sequence[ExpertProgram]:
        if isinstance(index, int) and 0 <= index < len(self._programs):  # the usual case, once a layer
            return self._programs[index]
        self._fetch()
        return self._programs[index]

    def __len__(self) -> int:
        self._fetch()
        return len(self._programs)

    def _fetch(self) -> None:
        while (flat := self._native.hook_program(self._handle(), len(self._programs))) is not None:
            self._programs.append(program_of_flat(*flat))


class ExpertHook:
    """One model's hook. Make it, `attach` it to the parameters of one model, close it after that model.

    `on_layer` runs in the thread that called llama_decode, once per MoE layer and ubatch, and must fill
    every row of the call's output. An exception it raises ends the decode (llama_decode returns -3, or 2
    for `DecodeAborted`) and is kept for `take_failure` in that thread. Several contexts of the model may
    decode in several threads; `on_layer` is then entered concurrently.
    """

    programs: Sequence[ExpertProgram]
    """Programs seen so far, by `LayerCall.program_index`; grows. A program keeps its index."""

    def __init__(self, on_layer: Callable[[LayerCall], None], sum_layers: Sequence[int] = ()) -> None:
        """``sum_layers``: those for which weighted sums are asked for, where the model's graph has them.

        Their plain form is the experts' rows times the router's weights, added up slot by slot. In a layer
        where that is not what the graph does, and in all other layers, a row is asked for each slot.
        """
        self._native = load()
        self._failures: dict[int, BaseException] = {}  # by the thread that decodes
        self._kept: list[Any] = []  # what the native side has addresses of
        self._callback = LayerCallback(self._callback_of(on_layer))
        self._hook = self._native.hook_create(self._callback)
        if not self._hook:
            raise EngineFailed("the hook could not be created")
        layers = (ctypes.c_int32 * len(sum_layers))(*sum_layers)
        if self._native.hook_claim_sums(self._hook, layers, len(layers)) != 0:
            raise LocalProtocolError(f"no model has all of the layers {list(sum_layers)}")
        self.programs = _ProgramTable(self._native, self._handle)

    def attach(self, model_params: Any, trunk_device: int | None = None) -> None:
        """Change a `llama_cpp.llama_model_params` so that the model loaded with it uses this hook.

        Routed experts get the hook's buffer type, everything else stays with the processor or goes to
        ``trunk_device``, a ggml device's address. The hook must outlive the model.
        """
        handle = self._handle()
        self._kept += place_tensors(
            model_params,
            trunk_device=trunk_device,
            other_devices=(self._native.hook_device(handle),),
            expert_buffer_type=self._native.hook_buffer_type(handle),
        )

    @property
    def calls(self) -> int:
        """How many layer calls were completed."""
        return self._native.hook_calls(self._handle())

    @property
    def rows_unfilled_total(self) -> int:
        """Rows that a callback claimed to have filled and had not; each such call was failed instead."""
        return self._native.hook_rows_unfilled(self._handle())

    @property
    def failure(self) -> BaseException | None:
        """What the callback raised last in this thread, until it is taken."""
        return self._failures.get(threading.get_ident())

    def take_failure(self) -> BaseException | None:
        """Why this thread's last decode failed, once; None when the hook had no part in it.

        It is what the callback raised, or `EngineFailed` for a sub-graph that is no expert program.
        """
        failure = self._failures.pop(threading.get_ident(), None)
        refusal = self._native.hook_take_error(self._handle())
        if failure is None and refusal:
            failure = EngineFailed(refusal)
        return failure

    def close(self) -> None:
        """Free the hook. Idempotent. `LocalProtocolError` while a model or context still uses it."""
        if self._hook:
            if self._native.hook_destroy(self._hook) != 0:
                raise LocalProtocolError("the hook is still used by a model")
            self._hook = None
            self._kept.clear()

    def _handle(self) -> int:
        if not self._hook:
            raise LocalProtocolError("the hook is closed")
        return self._hook

    def _callback_of(self, on_layer: Callable[[LayerCall], None]) -> Callable[[int], int]:
        """The C callback. An exception must not leave it: ctypes would return an undefined status."""
        views: dict[int, LayerCall] = {}  # one for each context, which has one struct for all its calls
        at_address = LayerCall.from_address

        def callback(address: int) -> int:
            try:
                call = views.get(address)
                if call is None:
                    call = views[address] = at_address(address)
                on_layer(call)
            except DecodeAborted as abort:
                self._failures[threading.get_ident()] = abort
                expect_errors()
                return LAYER_ABORTED
            except BaseException as failure:
                self._failures[threading.get_ident()] = failure
                return LAYER_FAILED
            return LAYER_DONE

        return callback
