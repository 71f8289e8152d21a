"""An engine process that does wrong at a chosen moment: the real engine, with a saboteur at its socket.

``python -m tests.loopback.misbehaving_engine`` takes the arguments of ``kvasir_node.engine``. Each
connection that a worker accepts reads a `Script` from a directory: which fault, at which dispatch. The
process does it to itself when that dispatch has arrived, so that no test has to hit a moment. What the script
does not name is the real worker's work: handshake, checks, kernel, frames.

As a backbone it is the real one too, but for its deadlines: `write_reply_floor` shortens or stretches the
constant part, holder by holder.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import json
import math
import os
import select
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from kvasir_node.backbone import engine as backbone_engine
from kvasir_node.backbone.holder import RemoteHolder, open_remote_holder
from kvasir_node.engine.process import main
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.worker import engine as worker_engine
from kvasir_node.worker.connection import BackboneConnection, ServingCounters
from kvasir_proto import dispatch
from kvasir_proto.dispatch import DispatchHeader, Opening
from kvasir_proto.ids import NodeId
from kvasir_proto.limits import EXPERTS_MAX

DIRECTORY_VARIABLE: Final = "MISBEHAVIOUR_DIRECTORY"
SLOW_S: Final = 0.3
HOLD_S_MAX: Final = 60.0
"""A process that holds its reply and is forgotten goes on after this."""

_SCRIPT: Final = "script.json"
_FIRED: Final = "fired.json"
_GO_ON: Final = "go-on"
_FLOORS: Final = "reply-floors.json"
_PAYLOAD_BYTES: Final = struct.Struct("<Q")
_REQUEST_ID_OFFSET: Final = 8
_PAYLOAD_BYTES_OFFSET: Final = 16
_PARTIAL_ROW_BYTES: Final = 5
_FUTURE_FENCE: Final = (1 << 31, 0)


class Fault(enum.Enum):
    """What a worker does wrong with one dispatch."""

    NOTHING = "nothing"
    HOLD = "holds its reply until it is told to go on"
    KILLED = "killed"
    STOPPED = "stopped"
    SLOW = "slow"
    HALF_FRAME = "half a frame"
    GARBAGE = "garbage"
    CLOSED = "closed"
    CLOSED_MID_REPLY = "closed mid-reply"
    LATE = "answers late"
    TWICE = "answers twice"
    NAN = "NaN"
    WRONG_SHAPE = "wrong shape"
    FOREIGN_EXPERT = "foreign ids"
    FOREIGN_REQUEST = "answers another request"
    WRONG_TERM = "wrong term"


@dataclass(frozen=True)
class Script:
    """One fault, once a connection, at the first dispatch of ``layer`` in a pass that is late enough.

    A pass is one ubatch through the layers; the connection's first has number 0. ``layer`` None: any layer.
    """

    fault: Fault = Fault.NOTHING
    layer: int | None = None
    pass_min: int = 0

    def write(self, directory: Path) -> None:
        """Make it the script of the next connection."""
        for name in (_FIRED, _GO_ON):
            (directory / name).unlink(missing_ok=True)
        (directory / _SCRIPT).write_text(json.dumps(dataclasses.asdict(self) | {"fault": self.fault.name}))

    @staticmethod
    def read(directory: Path) -> Script:
        """What was written last."""
        fields = json.loads((directory / _SCRIPT).read_text())
        return Script(**fields | {"fault": Fault[fields["fault"]]})


@dataclass(frozen=True)
class Fired:
    """The dispatch at which a fault was done."""

    layer: int
    pass_number: int

    @staticmethod
    def read(directory: Path) -> Fired | None:
        """None while nothing was done yet."""
        with contextlib.suppress(FileNotFoundError):
            return Fired(**json.loads((directory / _FIRED).read_text()))
        return None


def go_on(directory: Path) -> None:
    """Let a worker that holds its reply send it."""
    (directory / _GO_ON).touch()


def write_reply_floor(directory: Path, floors_ns: dict[NodeId, int]) -> None:
    """For a backbone's next connections: the constant part of these holders' deadlines."""
    (directory / _FLOORS).write_text(json.dumps(floors_ns))


class Saboteur:
    """A worker's end of its connection. It hands over one frame at a time: what is sent between is a reply.

    ``due``: the fault that the dispatch being answered is to have.
    """

    def __init__(self, connection: ssl.SSLSocket, directory: Path) -> None:
        self._connection = connection
        self._directory = directory
        self.script = Script.read(directory)
        self.due = Fault.NOTHING
        self._fired = False
        self._pass_number = 0
        self._layer_before = -1
        self._header = bytearray()
        self._payload_left = 0
        self._reply = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def recv_into(self, buffer: memoryview) -> int:
        """Send what was answered, then read on, not past the end of a frame's header or payload."""
        self._send_reply()
        room = self._payload_left or dispatch.HEADER_BYTES - len(self._header)
        count = self._connection.recv_into(buffer[:room])
        if self._payload_left:
            self._payload_left -= count
            return count
        self._header += buffer[:count]
        if len(self._header) == dispatch.HEADER_BYTES:
            header = dispatch.parse_header(self._header)
            self._header.clear()
            self._payload_left = header.payload_bytes
            if isinstance(header, DispatchHeader):
                self._notice(header.layer)
        return count

    def send(self, data: memoryview) -> int:
        """Keep it until the whole reply is there."""
        self._reply += data
        return len(data)

    def _notice(self, layer: int) -> None:
        """A dispatch arrives: is it the one?"""
        self._pass_number += layer <= self._layer_before
        self._layer_before = layer
        script = self.script
        if self._fired or script.layer not in (None, layer) or self._pass_number < script.pass_min:
            return
        if script.fault is Fault.NOTHING:
            return
        self._fired = True
        self.due = script.fault
        partial = self._directory / f".{_FIRED}"
        partial.write_text(json.dumps(dataclasses.asdict(Fired(layer, self._pass_number))))
        partial.replace(self._directory / _FIRED)
        match script.fault:
            case Fault.KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.STOPPED:
                # To this very thread, which then does not get as far as an answer before the process stops.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            case Fault.CLOSED:
                raise ConnectionResetError("closed by its script")
            case Fault.HOLD:
                deadline = time.monotonic() + HOLD_S_MAX
                while not (self._directory / _GO_ON).exists() and time.monotonic() < deadline:
                    time.sleep(0.005)
            case _:
                pass

    def _send_reply(self) -> None:
        reply, self._reply = self._reply, bytearray()
        if not reply:
            return
        fault, self.due = self.due, Fault.NOTHING
        beginning = reply[: dispatch.HEADER_BYTES + _PARTIAL_ROW_BYTES]
        match fault:
            case Fault.HALF_FRAME:
                self._connection.sendall(beginning)
            case Fault.CLOSED_MID_REPLY:
                self._connection.sendall(beginning)
                raise ConnectionResetError("closed by its script")
            case Fault.GARBAGE:
                self._connection.sendall(bytes(7 + each % 200 for each in range(len(reply))))
            case Fault.LATE:
                self._wait_given_up()
                self._connection.sendall(reply)
            case Fault.TWICE:
                self._connection.sendall(reply + reply)
            case Fault.WRONG_SHAPE:
                self._connection.sendall(_without_a_value(reply))
            case Fault.FOREIGN_REQUEST:
                reply[_REQUEST_ID_OFFSET + 2] ^= 1
                self._connection.sendall(reply)
            case _:
                self._connection.sendall(reply)

    def _wait_given_up(self) -> None:
        """Wait until the backbone has closed the connection: there is nothing else that it might send."""
        waiter = select.poll()
        waiter.register(self._connection.fileno(), select.POLLIN)
        waiter.poll(int(HOLD_S_MAX * 1000))


def _without_a_value(reply: bytearray) -> bytearray:
    """A reply that lacks its first F32, and says so."""
    (payload_bytes,) = _PAYLOAD_BYTES.unpack_from(reply, _PAYLOAD_BYTES_OFFSET)
    shorter = reply[: dispatch.HEADER_BYTES] + reply[dispatch.HEADER_BYTES + 4 :]
    _PAYLOAD_BYTES.pack_into(shorter, _PAYLOAD_BYTES_OFFSET, payload_bytes - 4)
    return shorter


class SabotagedKernel:
    """The worker's kernel; what is wrong with its ids, its rows or its speed, the saboteur says."""

    def __init__(self, kernel: ExpertKernel, saboteur: Saboteur) -> None:
        self._kernel = kernel
        self._saboteur = saboteur

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def compute(self, *, expert_of_pair_address: int, out_address: int, **rest: int) -> None:
        """Compute; wrongly or slowly if that is due."""
        due = self._saboteur.due
        if due is Fault.SLOW:
            time.sleep(SLOW_S)
        if due is Fault.FOREIGN_EXPERT:
            ctypes.c_int32.from_address(expert_of_pair_address).value = EXPERTS_MAX
        self._kernel.compute(expert_of_pair_address=expert_of_pair_address, out_address=out_address, **rest)
        if due is Fault.NAN:
            ctypes.c_float.from_address(out_address).value = math.nan


class MisbehavingConnection(BackboneConnection):
    """Serves a backbone as the script of its directory says."""

    def __init__(
        self,
        connection: socket.socket,
        kernel: ExpertKernel,
        kernel_lock: threading.Lock,
        check_opening: Callable[[Opening], None],
        current_fence: Callable[[], tuple[int, int]],
        counters: ServingCounters,
        seal: Callable[[int, bytes, bytes], bytes],
    ) -> None:
        saboteur = Saboteur(cast(ssl.SSLSocket, connection), _directory())
        super().__init__(
            cast(socket.socket, saboteur),
            cast(ExpertKernel, SabotagedKernel(kernel, saboteur)),
            kernel_lock,
            check_opening,
            lambda: _FUTURE_FENCE if saboteur.due is Fault.WRONG_TERM else current_fence(),
            counters,
            seal,
        )


def _directory() -> Path:
    return Path(os.environ[DIRECTORY_VARIABLE])


def _patch_engines() -> None:
    vars(worker_engine)["BackboneConnection"] = MisbehavingConnection

    def open_with_floor(node_id: NodeId, connection: ssl.SSLSocket, open_payload: bytes) -> RemoteHolder:
        holder = open_remote_holder(node_id, connection, open_payload)
        holder.reply_floor_ns = json.loads((_directory() / _FLOORS).read_text())[node_id]
        return holder

    vars(backbone_engine)["open_remote_holder"] = open_with_floor


if __name__ == "__main__":
    _patch_engines()
    sys.exit(main(sys.argv[1:]))
