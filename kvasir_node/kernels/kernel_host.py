"""A kernel host: the expert kernel as a child process that is asked over a pipe.

Decides how a request and a reply look on the pipe (`native/host/host_protocol.h` is the other side), and what
becomes of a child that is late, talks nonsense or dies: it is killed, and every call from then on is
`EngineFailed`. So no wait is without a deadline. Its functions are those of `native_library` of the same
names, so that the same kernel runs on both. It refuses to know which program it starts, and what that is
emulated by.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from kvasir_node.native_library import NATIVE_ABI
from kvasir_proto.errors import EngineFailed, IncompatibleVersion
from kvasir_proto.limits import as_sentence

HOST_VERSION: Final = 1
"""`kHostVersion` of the header that this module mirrors."""

START_TIMEOUT_S: Final = 30.0
"""From the start of the child to the whole of its hello. An emulator loads in a tenth of a second."""

CALL_TIMEOUT_S: Final = 600.0
"""The longest that any call may take, from the first byte of a request to the last of its reply."""
CALL_FLOOR_S: Final = 20.0
"""What any call may take however little it asks: a machine may have ten times as much to do as it can."""
CALL_MARGIN: Final = 8
PRODUCT_S: Final = 21e-9
"""Time of one multiplication before it is known: an emulated processor takes 0.2 s for a row through a matrix
of 3072 x 1024 in each of an expert's three tensors, in F16, and a probe sends 512 at once."""
PRODUCTS_MEASURED_MIN: Final = 1_000_000
"""Calls of fewer multiplications take most of their time for other things, and tell nothing."""
BYTE_S: Final = 100e-9
"""What a byte on the pipe may take."""

STOP_TIMEOUT_S: Final = 5.0
"""How long a child may take to end that was told to, and to be gone once it was killed."""

PAYLOAD_BYTES_MAX: Final = 1 << 30
REASON_BYTES_MAX: Final = 512
PAIRS_MAX: Final = 65536
"""`KVASIR_KERNEL_PAIRS_MAX`."""

_HELLO: Final = struct.Struct("<8s2I16s224s")
_HEADER: Final = struct.Struct("<IiQ")
_HELLO_MAGIC: Final = b"KVASIRKH"
_REQUEST: Final = int.from_bytes(b"KVRQ", "little")
_REPLY: Final = int.from_bytes(b"KVRP", "little")

_CREATE, _ADD_LAYER, _ADD_TENSOR, _SET_EXPERT, _MEMORY, _ADD_PROGRAM, _BIND, _COMPUTE = range(1, 9)

_DONE: Final = 0
_INVALID: Final = -1
_PROTOCOL: Final = -100
_HANDLE: Final = 1
"""A host has one kernel, so that its handle says nothing."""


class CallTimes:
    """How long calls to one host may take, by what they ask, as far as its speed is known."""

    def __init__(self, longest_s: float = CALL_TIMEOUT_S) -> None:
        self._longest_s = longest_s
        self._product_s: float | None = None

    def allowed_s(self, n_products: int, size_bytes: int) -> float:
        """For a call with so many multiplications, and so many bytes there and back."""
        product_s = PRODUCT_S if self._product_s is None else self._product_s
        expected_s = CALL_MARGIN * n_products * product_s + size_bytes * BYTE_S
        return min(self._longest_s, CALL_FLOOR_S + expected_s)

    def learn(self, n_products: int, took_s: float) -> None:
        """One took so long. The slowest counts: a few rows at once are slower than many, each."""
        if n_products >= PRODUCTS_MEASURED_MIN:
            self._product_s = max(self._product_s or 0.0, took_s / n_products)


class KernelHost:
    """One child process and its kernel. Closed by `kernel_destroy`, or by `close` if there never was one."""

    def __init__(
        self,
        command: Sequence[str],
        start_timeout_s: float = START_TIMEOUT_S,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Start ``command`` and hear its hello; what it complains of goes to our standard error.

        Raises `EngineFailed` when it cannot be started or says nothing in time, `IncompatibleVersion` when it
        is a host of another build.
        """
        self._command = tuple(command)
        self._times = CallTimes(call_timeout_s)
        self._n_products: dict[int, int] = {}
        """Multiplications of a row through one expert, at most, by layer."""
        self._lock = threading.Lock()
        self._lost = ""
        self._reason = ""
        self._widths: dict[tuple[int, int], tuple[int, int]] = {}
        try:
            # Its own session: an interrupt at the terminal is for us, who end it in order.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise EngineFailed(
                f"the kernel host {self._command[0]!r} cannot be started: {error.strerror}"
            ) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        try:
            self.ggml_version, self.features = self._hear_hello(start_timeout_s)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End the child: politely, and then not. Idempotent; no call may be running."""
        self._lost = self._lost or "it was closed"
        self._end(politely=True)

    def kernel_create(self, threads: int, n_expert: int) -> int | None:
        """A handle, or None when a number is out of range."""
        status = self._ask(_CREATE, struct.pack("<2i", threads, n_expert))
        return _HANDLE if status == _DONE else None

    def kernel_destroy(self, kernel: int) -> None:
        """End the child."""
        self.close()

    def kernel_add_layer(self, kernel: int, layer: int, experts: Any, n_held: int) -> int:
        """`experts` is an array of ctypes."""
        return self._ask(_ADD_LAYER, struct.pack("<2i", layer, n_held) + bytes(experts))

    def kernel_add_tensor(
        self, kernel: int, layer: int, tensor: int, type_id: int, shape: Any, n_dims: int
    ) -> int:
        """`shape` is an array of ctypes, of `n_dims` numbers or more."""
        if n_dims >= 2:
            self._n_products[layer] = self._n_products.get(layer, 0) + shape[0] * shape[1]
        words = struct.pack("<4i", layer, tensor, type_id, n_dims)
        return self._ask(_ADD_TENSOR, words + bytes(shape)[: 8 * n_dims])

    def kernel_set_expert(
        self, kernel: int, layer: int, tensor: int, expert: int, address: int, size_bytes: int
    ) -> int:
        """Copies the expert's bytes to the child."""
        self._widths.clear()
        words = struct.pack("<4i", layer, tensor, expert, 0)
        return self._ask(_SET_EXPERT, words, _memory(address, size_bytes))

    def kernel_memory_bytes(self, kernel: int) -> int:
        """Bytes of weights held by the child."""
        answer = bytearray(8)
        self._ask(_MEMORY, b"", result=memoryview(answer))
        return int.from_bytes(answer, "little", signed=True)

    def kernel_add_program(self, kernel: int, index: int, flat: bytes, n_steps: int) -> int:
        """`flat` is the steps as C has them."""
        self._widths.clear()
        return self._ask(_ADD_PROGRAM, struct.pack("<2i", index, n_steps) + flat)

    def kernel_bind(self, kernel: int, layer: int, index: int) -> tuple[int, int, int]:
        """(status, width of an input row, width of an output row). Asked once for each."""
        widths = self._widths.get((layer, index))
        if widths is None:
            answer = bytearray(8)
            status = self._ask(_BIND, struct.pack("<2i", layer, index), result=memoryview(answer))
            if status != _DONE:
                return status, 0, 0
            width_in, width_out = struct.unpack("<2i", answer)
            if width_in < 1 or width_out < 1:
                raise self._fail(f"it says that rows are {width_in} and {width_out} wide")
            widths = self._widths[layer, index] = width_in, width_out
        return _DONE, *widths

    def kernel_compute(
        self,
        kernel: int,
        layer: int,
        index: int,
        n_rows: int,
        n_pairs: int,
        x_address: int,
        row_of_pair_address: int,
        expert_of_pair_address: int,
        out_address: int,
    ) -> int:
        """As in C: a status, and rows at `out_address` where it is 0. Keeps the GIL free meanwhile."""
        status, width_in, width_out = self.kernel_bind(kernel, layer, index)
        if status != _DONE:
            return status
        if not 1 <= n_rows <= n_pairs <= PAIRS_MAX:
            return self._refuse(f"{n_rows} rows in {n_pairs} pairs are out of range")
        x_bytes, out_bytes = 4 * n_rows * width_in, 4 * n_pairs * width_out
        if max(16 + 8 * n_pairs + x_bytes, out_bytes) > PAYLOAD_BYTES_MAX:
            return self._refuse(f"{n_rows} rows in {n_pairs} pairs are more than a kernel host takes at once")
        status = self._ask(
            _COMPUTE,
            struct.pack("<4i", layer, index, n_rows, n_pairs),
            _memory(row_of_pair_address, 4 * n_pairs),
            _memory(expert_of_pair_address, 4 * n_pairs),
            _memory(x_address, x_bytes),
            result=_memory(out_address, out_bytes),
            n_products=n_pairs * self._n_products.get(layer, 0),
        )
        return status

    def kernel_error(self, kernel: int) -> str:
        """A sentence about the last call that was refused."""
        return self._reason

    def _refuse(self, reason: str) -> int:
        self._reason = reason
        return _INVALID

    def _ask(
        self,
        operation: int,
        *parts: bytes | memoryview,
        result: memoryview | None = None,
        n_products: int = 0,
    ) -> int:
        """One request and its reply's status. Where it is 0 `result` has been filled; else see the reason.

        Raises `EngineFailed`.
        """
        size_bytes = sum(len(part) for part in parts)
        if size_bytes > PAYLOAD_BYTES_MAX:
            raise EngineFailed(f"a request of {size_bytes} bytes is more than a kernel host takes")
        with self._lock:
            if self._lost:
                raise self._gone()
            try:
                return self._exchange(operation, parts, size_bytes, result, n_products)
            except EngineFailed:
                raise
            except BaseException:  # an interrupt: half of an exchange is still on its way
                self._fail("a call to it was broken off")
                raise

    def _exchange(
        self,
        operation: int,
        parts: Sequence[bytes | memoryview],
        size_bytes: int,
        result: memoryview | None,
        n_products: int,
    ) -> int:
        began = time.monotonic()
        wanted_bytes = 0 if result is None else len(result)
        deadline = began + self._times.allowed_s(n_products, size_bytes + wanted_bytes)
        # Where it reads no more it may have said why before it went.
        with contextlib.suppress(BrokenPipeError):
            for part in (_HEADER.pack(_REQUEST, operation, size_bytes), *parts):
                self._write(part, deadline)
        status: int
        magic, status, reply_bytes = _HEADER.unpack(self._read_bytes(_HEADER.size, deadline))
        if magic != _REPLY:
            raise self._fail("its answer is no reply")
        if status == _DONE:
            if reply_bytes != wanted_bytes:
                raise self._fail(f"its reply has {reply_bytes} bytes, not {wanted_bytes}")
            if result is not None:
                self._read(result, deadline)
            self._times.learn(n_products, time.monotonic() - began)
            return status
        if reply_bytes > REASON_BYTES_MAX:
            raise self._fail(f"its reason has {reply_bytes} bytes")
        self._reason = as_sentence(self._read_bytes(reply_bytes, deadline).decode(errors="replace"))
        if status == _PROTOCOL:
            raise self._fail(f"it understood nothing: {self._reason}")
        return status

    def _hear_hello(self, timeout_s: float) -> tuple[str, str]:
        hello = self._read_bytes(_HELLO.size, time.monotonic() + timeout_s)
        magic, version, abi, ggml_version, features = _HELLO.unpack(hello)
        if magic != _HELLO_MAGIC:
            raise self._fail("its first words are no hello")
        if (version, abi) != (HOST_VERSION, NATIVE_ABI):
            raise IncompatibleVersion(
                f"the kernel host {self._command[-1]!r} speaks version {version} with ABI {abi}, this "
                f"Kvasir {HOST_VERSION} with {NATIVE_ABI}: build it again with 'make backends'"
            )
        return _text(ggml_version), _text(features)

    def _write(self, data: bytes | memoryview, deadline: float) -> None:
        """All of it. Raises `BrokenPipeError` where the child reads no more, `EngineFailed` if it is late."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._input, rest) :]
            except BlockingIOError:
                self._wait(self._input, select.POLLOUT, deadline)

    def _read_bytes(self, size_bytes: int, deadline: float) -> bytes:
        buffer = bytearray(size_bytes)
        self._read(memoryview(buffer), deadline)
        return bytes(buffer)

    def _read(self, to: memoryview, deadline: float) -> None:
        """Fill `to`. Raises `EngineFailed` when the child ends before, or is late."""
        while to:
            try:
                count = os.readv(self._output, [to])
            except BlockingIOError:
                self._wait(self._output, select.POLLIN, deadline)
                continue
            if count == 0:
                raise self._fail(self._how_it_ended())
            to = to[count:]

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        poll = select.poll()
        poll.register(pipe, event)
        if left_s <= 0 or not poll.poll(1000 * left_s):
            raise self._fail("it did not answer in time")

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if status >= 0:
            return f"it ended with status {status}"
        with contextlib.suppress(ValueError):
            return f"it was ended by {signal.Signals(-status).name}"
        return f"it was ended by signal {-status}"

    def _fail(self, reason: str) -> EngineFailed:
        """Give the child up for good: what it says next would be taken for the answer to something else."""
        self._lost = reason
        self._end()
        return self._gone()

    def _gone(self) -> EngineFailed:
        return EngineFailed(f"the kernel host {self._command[-1]!r} is lost: {self._lost}")

    def _end(self, *, politely: bool = False) -> None:
        """Close both pipes, and have no child left, unless the system cannot end it."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        if politely:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
                return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)


def _memory(address: int, size_bytes: int) -> memoryview:
    """The bytes at an address, which the caller keeps alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _text(padded: bytes) -> str:
    return as_sentence(padded.split(b"\0", 1)[0].decode(errors="replace"))
