"""The file of a long series of runs: what they were, and a line for each that is done, so that it can go on.

The first line names the options that all runs share and the code they ran on, by a digest of its sources: a
series says something of one program, so a file of another is refused and never continued. A line has what
judging the series needs and no more, since thousands of them are kept. A run that was cut off in the middle
of its line is run again. It runs nothing itself.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final, TextIO

import kvasir_node
import kvasir_proto
from kvasir_node.sim.report import replay_command
from kvasir_node.sim.simulation import SimulationOptions
from kvasir_proto.errors import UsageError

SCHEMA_VERSION: Final = 1
_USUAL: Final[dict[str, Any]] = {
    "safety_violations": [],
    "converged": True,
    "lacking": None,
    "backbones_per_term_max": 1,
    "beyond_bound": False,
    "detections": {},
}
"""What a line leaves out where it is so."""
_KEPT: Final = ("seed", *_USUAL, "convergence_s", "messages", "wall_s")


def code_digest() -> str:
    """The code that decides how a run goes: cores, codec and simulator, by their sources."""
    digest = hashlib.sha256()
    for package, below in ((kvasir_proto, "."), (kvasir_node, "sim")):
        assert package.__file__ is not None
        root = Path(package.__file__).parent
        for path in sorted((root / below).rglob("*.py")):
            digest.update(f"{package.__name__}/{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class ResultsFile:
    """The runs of a series that are done, by seed. Raises `UsageError` for a file of another series."""

    def __init__(self, path: Path, options: SimulationOptions, faults: str) -> None:
        """`options` are those of any run of the series, `faults` what was said on the command line."""
        self._path = path
        self._options = options
        self._faults = faults
        self._header = {
            "schema_version": SCHEMA_VERSION,
            "code": code_digest(),
            "nodes": options.nodes,
            "seconds": options.seconds,
            "faults": list(options.faults),
            "lying_electors": options.lying_electors,
        }
        self.done: dict[int, dict[str, Any]] = {}
        self._size_whole = 0
        if path.exists():
            self._read()

    def open(self) -> TextIO:
        """The file to `write` to, with its first line there and a line that was cut off gone."""
        file = self._path.open("a", encoding="utf-8")
        file.truncate(self._size_whole)
        if not self._size_whole:
            self._append(file, self._header)
        return file

    def write(self, file: TextIO, document: dict[str, Any]) -> None:
        """Add one run, on the disk before the next begins."""
        line = {name: document[name] for name in _KEPT}
        line = {name: value for name, value in line.items() if name not in _USUAL or value != _USUAL[name]}
        self.done[document["seed"]] = self._whole(line)
        self._append(file, line)

    def _append(self, file: TextIO, line: dict[str, Any]) -> None:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")
        file.flush()

    def _whole(self, line: dict[str, Any]) -> dict[str, Any]:
        """A line with all that it left out."""
        options = SimulationOptions(
            self._options.nodes,
            self._options.seconds,
            line["seed"],
            self._options.faults,
            self._options.lying_electors,
        )
        return {
            **_USUAL,
            **line,
            "heal_limit_s": options.heal_limit / 1e9,
            "replay": replay_command(options, self._faults),
        }

    def _read(self) -> None:
        for number, line in enumerate(self._path.read_bytes().splitlines(keepends=True), 1):
            if not line.endswith(b"\n"):
                return
            try:
                document = json.loads(line)
                if number == 1:
                    self._compare(document)
                else:
                    self.done[int(document["seed"])] = self._whole(document)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UsageError(f"line {number} of {self._path} is no result of a run") from None
            self._size_whole += len(line)

    def _compare(self, header: dict[str, Any]) -> None:
        for name, ours in self._header.items():
            theirs = header.get(name)
            if theirs != ours:
                raise UsageError(
                    f"{self._path} is of another series of runs: {name} is {theirs} there and {ours} here"
                )
