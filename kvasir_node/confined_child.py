"""A child process that is fed what strangers wrote, and asked one thing after another.

Decides what becomes of a child that is late, dies or talks nonsense (it is killed, and the next request has
another one), whose turn it is, and when a child that nobody needs is ended. It has nothing of ours: no
descriptor but its two pipes, none of our variables beyond what a Python needs to start. `confinement` is its
end of the pipes. What is asked, and who is to blame for a child that died, is for the callers to say.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import trio

from kvasir_node.confinement import LENGTH
from kvasir_proto.errors import KvasirError

TURN_TIMEOUT_S: Final = 10.0
"""How long a request waits for those before it."""

END_TIMEOUT_S: Final = 2.0

_INHERITED: Final = ("PATH", "PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "HOME", "LANG")
"""Variables that a Python may need to start; no other one is the child's business."""


class ChildLate(KvasirError):
    """It had no time to answer: the machine has too much to do, or those before it took too long."""


class ChildLost(KvasirError):
    """It ended, or says what cannot be."""


class ConfinedChild:
    """One child process at most, started when it is asked for the first time.

    ``timeout_s`` is from a request to its whole answer, by the wall, the start of a child included; an answer
    is at most ``answer_bytes_max`` long. ``variables`` come on top of those it needs to start.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        timeout_s: float,
        answer_bytes_max: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.command = [sys.executable, "-P", "-m", module, *arguments]
        self.process: trio.Process | None = None
        self._timeout_s = timeout_s
        self._answer_bytes_max = answer_bytes_max
        self._variables = dict(variables or {})
        self._turn = trio.Lock()
        self._has_begun = trio.Event()
        """Set while there may be a child."""
        self._last_asked_at = 0.0

    async def ask(self, body: bytes) -> bytes:
        """What the child answers. Where anything goes wrong, and also when cancelled, it has been killed.

        Raises `ChildLate` or `ChildLost`.
        """
        with trio.move_on_after(TURN_TIMEOUT_S) as waiting:
            await self._turn.acquire()
        if waiting.cancelled_caught:
            raise ChildLate("too many wait already")
        try:
            return await self._ask(body)
        finally:
            self._last_asked_at = trio.current_time()
            self._turn.release()

    async def end_when_idle(self, idle_s: float) -> None:
        """Until cancelled, end a child that nobody has asked for so long; then the one there is."""
        try:
            while True:
                await self._has_begun.wait()
                await trio.sleep_until(self._last_asked_at + idle_s)
                async with self._turn:
                    if self._last_asked_at + idle_s <= trio.current_time():
                        await self.close()
        finally:
            await self.close()

    async def close(self) -> None:
        """End the child. Idempotent."""
        process, self.process = self.process, None
        self._has_begun = trio.Event()
        if process is None:
            return
        process.kill()
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            assert process.stdin is not None
            assert process.stdout is not None
            await trio.aclose_forcefully(process.stdin)
            await trio.aclose_forcefully(process.stdout)
            await process.wait()

    async def _ask(self, body: bytes) -> bytes:
        try:
            with trio.fail_after(self._timeout_s):
                if self.process is not None and self.process.returncode is not None:
                    await self.close()  # somebody killed it while it had nothing to do
                if self.process is None:
                    self.process = await self._started()
                    self._has_begun.set()
                process = self.process
                assert process.stdin is not None
                assert process.stdout is not None
                await process.stdin.send_all(LENGTH.pack(len(body)) + body)
                (length,) = LENGTH.unpack(await _read(process.stdout, LENGTH.size))
                if length > self._answer_bytes_max:
                    raise EOFError
                return await _read(process.stdout, length)
        except trio.TooSlowError:
            await self.close()
            raise ChildLate(f"no answer within {self._timeout_s:g} s") from None
        except (EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self.close()
            raise ChildLost("its process ended") from None
        except BaseException:
            await self.close()
            raise

    async def _started(self) -> trio.Process:
        # Its own session: an interrupt at the terminal is for us. What it complains of could be a prompt.
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        try:
            return await trio.lowlevel.open_process(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=inherited | self._variables,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise ChildLate(f"it cannot be started: {error.strerror or error}") from error


async def _read(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    """Exactly so many bytes. Raises `EOFError` when the stream ends before."""
    parts: list[bytes] = []
    while count:
        part = await stream.receive_some(min(count, 1 << 16))
        if not part:
            raise EOFError
        parts.append(bytes(part))
        count -= len(part)
    return b"".join(parts)
