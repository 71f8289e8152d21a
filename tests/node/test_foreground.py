"""A command is done, fails, or is told to stop: what it has to clear away is cleared away each time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from kvasir_node.foreground import run_in_foreground
from kvasir_proto.errors import KvasirError, ModelUnusable

# Works in a directory of its own until it is told to stop.
SCRIPT = """
import sys
from pathlib import Path
import trio
from kvasir_node.foreground import run_in_foreground
from kvasir_node.working_directory import working_directory
from kvasir_proto.errors import KvasirError

async def work(directory):
    (directory / "file").write_bytes(bytes(1000))
    print(directory, flush=True)
    await trio.sleep_forever()

try:
    with working_directory(Path(sys.argv[1]), "measure") as directory:
        run_in_foreground(work, directory)
except (KvasirError, KeyboardInterrupt) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def test_what_work_gives_or_raises_is_given_or_raised() -> None:
    async def give(number: int) -> int:
        await trio.lowlevel.checkpoint()
        if number < 0:
            raise ModelUnusable("negative")
        return number

    assert run_in_foreground(give, 3) == 3
    with pytest.raises(ModelUnusable, match="negative"):
        run_in_foreground(give, -1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_stop_says_so(number: signal.Signals) -> None:
    async def wait() -> None:
        os.kill(os.getpid(), number)
        await trio.sleep_forever()

    before = signal.getsignal(number)
    with pytest.raises(KvasirError, match=f"^stopped by {number.name}$"):
        run_in_foreground(wait)
    assert signal.getsignal(number) is before


def test_what_is_to_be_ignored_stays_ignored() -> None:
    async def hang_up() -> str:
        os.kill(os.getpid(), signal.SIGHUP)
        await trio.sleep(0.05)
        return "done"

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_in_foreground(hang_up) == "done"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_told_to_stop_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            directory = Path(process.stdout.readline().decode().strip())
            assert (directory / "file").exists()
            process.send_signal(number)
            said = process.stderr.read().decode()
            assert process.wait(30.0) == 1, said
        finally:
            process.kill()
    assert said.startswith(
        "KeyboardInterrupt" if number is signal.SIGINT else f"KvasirError: stopped by {number.name}"
    )
    assert list(tmp_path.iterdir()) == []
