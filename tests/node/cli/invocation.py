"""One call of the command line: in this process where that makes no difference, which is much faster, or in a
process of its own, as a shell would see it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_node import telemetry
from kvasir_node.cli import main

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which must be exactly one JSON object."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        assert document["schema_version"] == 1
        return document

    @property
    def sentence(self) -> str:
        """Standard error, which must be one line that says who speaks."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("kvasir-node: "), self.err
        return lines[0].removeprefix("kvasir-node: ")


def call(*arguments: str, home: Path) -> Outcome:
    """Run the command line in this process."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["--home", str(home), *arguments])
    # The loggers wrote to a stream that is about to go.
    telemetry.configure_telemetry("error", "console", {}, sys.__stderr__)
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
        stream.close()
    return Outcome(status, *texts)


def call_process(
    *arguments: str,
    home: Path | None = None,
    environment: Mapping[str, str | None] | None = None,
) -> Outcome:
    """Run it in a process of its own; variables that are None are removed from its environment."""
    variables = dict(os.environ)
    for name, value in (environment or {}).items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    where = [] if home is None else ["--home", str(home)]
    done = subprocess.run(
        [sys.executable, "-m", "kvasir_node", *where, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=variables,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr.decode(errors="replace")
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode(errors="replace"))
