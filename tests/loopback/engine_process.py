"""An engine process with control's end of its channel in the test's hand: blocking, one message at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.engine.channel import ControlChannel
from kvasir_proto.certificate import bind_engine
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.limits import Role
from kvasir_proto.messages.engine import (
    EngineCertificate,
    EngineFault,
    EngineHello,
    EngineIdentity,
    EngineMessage,
)

PATIENCE_S: Final = 60.0
"""How long an answer may take on a busy machine. Nothing waits for this to pass."""

_REPOSITORY: Final = Path(__file__).parents[2]
ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True)
class Resources:
    """What a process holds of the system."""

    descriptors: int
    sockets: int
    threads: int
    children: int


class EngineProcess:
    """One engine, introduced and with a certificate. ``module`` is what runs; ``variables`` it finds in its
    environment.
    """

    def __init__(
        self,
        role: Role,
        directory: Path,
        log_file: Path,
        *,
        module: str = "kvasir_node.engine",
        variables: dict[str, str] | None = None,
        node_key: Ed25519PrivateKey | None = None,
    ) -> None:
        key = node_key or Ed25519PrivateKey.generate()
        self.node_id: NodeId = node_id_of(key.public_key().public_bytes_raw())
        self.log_file = log_file
        self.unread: list[EngineMessage] = []
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        self._ours = ours
        self._channel = ControlChannel(ours)
        with log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", module, "--role", role),
                    *("--control-fd", str(theirs.fileno()), "--directory", str(directory)),
                    *("--log-level", "info"),
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": str(_REPOSITORY)} | (variables or {}),
            )
        theirs.close()
        hello = self.wait(EngineHello)
        digest = SwarmDigest(bytes(32))
        self.send(EngineIdentity(self.node_id, role, bind_engine(key, digest, hello.public_key, role, 1)))
        self.certificate = self.wait(EngineCertificate).certificate

    def send(self, message: EngineMessage) -> None:
        """Tell it something."""
        self._channel.send(message)

    def read(self) -> EngineMessage:
        """The next thing it says; a fault, silence and the end are failures."""
        if self.unread:
            return self.unread.pop(0)
        message = self._channel.receive()
        assert message is not None, f"the engine says nothing more:\n{self.log()}"
        assert not isinstance(message, EngineFault), message
        return message

    def wait(
        self,
        kind: type[ReplyT] | tuple[type[ReplyT], ...],
        where: Callable[[Any], bool] = lambda _: True,
    ) -> ReplyT:
        """The next message of that kind; what comes before it stays to be read."""
        passed: list[EngineMessage] = []
        while True:
            message = self.read()
            if isinstance(message, kind) and where(message):
                self.unread = passed + self.unread
                return message
            passed.append(message)

    def resources(self) -> Resources:
        """What it holds now."""
        proc = Path(f"/proc/{self.process.pid}")
        links = []
        for each in (proc / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                links.append(str(each.readlink()))
        threads = list((proc / "task").iterdir())
        children = [(each / "children").read_text().split() for each in threads if each.exists()]
        return Resources(
            len(links),
            sum(link.startswith("socket:") for link in links),
            len(threads),
            sum(len(each) for each in children),
        )

    def log(self) -> str:
        """The end of what it logged."""
        return self.log_file.read_text(errors="replace")[-3000:]

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.process.poll() is not None

    def close(self) -> None:
        """End it, whatever state it is in."""
        self._ours.close()
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_until(condition: Callable[[], Any], what: Callable[[], str]) -> Any:
    """The first value of ``condition`` that is true; ``what`` says what is missing."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"in {PATIENCE_S:g} s not: {what()}"
        time.sleep(0.005)
    return value
