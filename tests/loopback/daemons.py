"""Real daemons for tests: started by the command a user would type, each in a process group of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from kvasir_node.control import connect_daemon, request_status
from kvasir_node.locations import locate
from kvasir_proto.errors import KvasirError
from kvasir_proto.messages.local import GenerateEnd, GenerateRequest, Refusal, TokenEvent
from kvasir_proto.sampling import Sampling

PATIENCE_S = 60.0
POLL_S = 0.02


SAMPLING = Sampling(seed=5, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def kvasir(*arguments: str) -> list[str]:
    """The command line of a call."""
    return [sys.executable, "-m", "kvasir_node", *arguments]


def group_is_alive(group: int) -> bool:
    """Whether any process of this group is left, zombies included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first value of ``condition`` that is true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(POLL_S)
    raise AssertionError(f"in {timeout_s:g} s not: {what}")


class Daemon:
    """One daemon in its own home, that can be started more than once."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.arguments = arguments
        self.has_gateway = "false"
        """`gateway.enabled`: many daemons on one machine would want one port."""
        self.locations = locate(home, os.environ)
        self.log_file = home.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; a process from before must have ended or be about to."""
        previous = self._process
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                kvasir("--home", str(self.home), "run", *self.arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"KVASIR_GATEWAY_ENABLED": self.has_gateway},
                start_new_session=True,
            )
        if previous is not None:
            previous.wait(PATIENCE_S)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The control process."""
        assert self._process is not None
        return self._process

    def status(self) -> dict[str, Any] | None:
        """Its status document; None while it does not answer."""
        try:
            document: dict[str, Any] = json.loads(trio.run(request_status, self.locations))
        except KvasirError:
            return None
        return document

    def wait(
        self, condition: Callable[[dict[str, Any]], Any], what: str, timeout_s: float = PATIENCE_S
    ) -> dict[str, Any]:
        """The first status document that fulfils ``condition``."""

        def look() -> dict[str, Any] | None:
            assert self.process.poll() is None, f"it ended:\n{self.log()}"
            document = self.status()
            return document if document is not None and condition(document) else None

        document: dict[str, Any] = wait_for(look, f"{what}; last: {self.status()}\n{self.log()}", timeout_s)
        return document

    def wait_state(self, state: str) -> dict[str, Any]:
        """The first status document with that state."""
        return self.wait(lambda document: document["state"] == state, state)

    def wait_ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit status, once it and everything it started have ended."""
        status = self.process.wait(timeout_s)
        wait_for(lambda: not group_is_alive(self.process.pid), "the end of all its processes", timeout_s)
        return status

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the control process a signal, and only that."""
        self.process.send_signal(number)

    def end(self) -> None:
        """Make sure that nothing is left."""
        if self._process is not None and group_is_alive(self._process.pid):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def log(self) -> str:
        """The end of what it logged."""
        return self.log_file.read_text(errors="replace")[-3000:] if self.log_file.exists() else ""


async def run_session(
    daemon: Daemon, n_tokens: int, on_token: Callable[[int], None] = lambda _: None
) -> list[int]:
    """The token ids of one session on a fixed prompt; ``on_token`` is told how many there are after each."""
    tokens: list[int] = []
    with trio.fail_after(PATIENCE_S):
        async with connect_daemon(daemon.locations) as connection:
            await connection.send(GenerateRequest(None, (5, 6, 7), n_tokens, SAMPLING))
            while True:
                reply = await connection.receive()
                if isinstance(reply, GenerateEnd):
                    assert reply.reason != "failed", (reply.code, reply.detail)
                    return tokens
                assert not isinstance(reply, Refusal), reply
                assert isinstance(reply, TokenEvent)
                tokens.append(reply.token)
                on_token(len(tokens))
