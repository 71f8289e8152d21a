"""Values of llama.cpp's graph, seen by name as they are computed: hidden states and what routers say.

Decides how a value is read out of a running graph. llama.cpp asks of every node whether somebody wants to see
it and stops after those; what is inside an expert's part must not be asked for, since the hook would then see
half of it. Apart from the trunk because only measurements look inside. It refuses to know what names mean.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvasir_proto.errors import EngineFailed

Values = npt.NDArray[np.float32] | npt.NDArray[np.int32]

_TYPES: Final[dict[int, np.dtype[Any]]] = {
    llama_cpp.GGML_TYPE_F32: np.dtype(np.float32),
    llama_cpp.GGML_TYPE_I32: np.dtype(np.int32),
}
_NAME_BYTES: Final = 64


class _Tensor(ctypes.Structure):
    """ggml_tensor, of the release that is pinned; `native_library.self_check` compares its size."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * _NAME_BYTES),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    )


_NAME_OFFSET: Final = _Tensor.name.offset


class GraphWatch:
    """Shows named values to somebody. Make it, give it to one `Trunk`, keep it as long as that."""

    def __init__(self, wants: Callable[[str], bool], take: Callable[[str, Values], None]) -> None:
        """``wants`` says of a node's name, once, whether it is shown; ``take`` gets a copy, [rows, width].

        Both run in the thread that decodes. What ``take`` raises ends the decode and is `failure`.
        """
        self._wants = wants
        self._take = take
        self._wanted: dict[bytes, bool] = {}
        self.failure: BaseException | None = None
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self._look)

    def attach(self, context_params: Any) -> None:
        """Change a `llama_cpp.llama_context_params` so that its context shows its values."""
        context_params.cb_eval = self._callback

    def _look(self, address: int, is_question: bool, _: int) -> bool:
        """An exception must not leave it: ctypes would return an undefined answer."""
        try:
            name = ctypes.string_at(address + _NAME_OFFSET)
            wanted = self._wanted.get(name)
            if wanted is None:
                wanted = self._wanted[name] = self._wants(name.decode(errors="replace"))
            if wanted and not is_question:
                self._take(name.decode(), _values_of(_Tensor.from_address(address)))
            return wanted or not is_question
        except BaseException as failure:
            self.failure = failure
            return False


def _values_of(tensor: _Tensor) -> Values:
    """A copy of a matrix, row by row; a row may be longer in memory than what is seen of it."""
    dtype = _TYPES.get(tensor.type)
    if dtype is None or tensor.ne[2] != 1 or tensor.ne[3] != 1:
        raise EngineFailed(f"{tensor.name.decode(errors='replace')} is no matrix of F32 or I32 numbers")
    width, rows = int(tensor.ne[0]), int(tensor.ne[1])
    strides = (int(tensor.nb[1]), int(tensor.nb[0]))
    if rows == 0:
        return np.empty((0, width), dtype)
    size_bytes = strides[0] * (rows - 1) + strides[1] * (width - 1) + dtype.itemsize
    memory = memoryview((ctypes.c_char * size_bytes).from_address(tensor.data)).cast("B")
    values: Values = np.ndarray((rows, width), dtype, memory, strides=strides).copy()
    return values
