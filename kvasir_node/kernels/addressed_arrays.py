"""Arrays over memory that a kernel was given by its address, as the port hands rows over.

Apart from the kernels because each that is written in Python needs the same view. It checks nothing: that so
many bytes lie there is the caller's promise, as the port says.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt


def array_at(address: int, dtype: type[Any], *shape: int) -> npt.NDArray[Any]:
    """The array of this shape at an address of this process; writing to it writes there."""
    size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
    array: npt.NDArray[Any] = np.frombuffer(memory, np.dtype(dtype))
    return array.reshape(shape)
