"""`make fuzz`: every target in a process of its own, one after another, for a while; then a table.

Each process has a bound on its memory and on the time of one input, so that a hang and an allocation
without a bound are findings like any crash. What was found lies in a file, with the command to see it again;
it becomes a test beside the code it concerns. Exit status 1 when there was a finding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.sanitised import build_sanitised, sanitised_environment
from tests.fuzz.targets import TARGETS, Target

INPUT_TIMEOUT_S: Final = 10
"""An input that takes longer is a finding."""
RESIDENT_MIB_MAX: Final = 768
SLACK_S: Final = 120
"""How much longer than asked a process may take to start and to end before it is killed."""

_EXECUTED: Final = re.compile(r"stat::number_of_executed_units: *(\d+)")
_PEAK: Final = re.compile(r"stat::peak_rss_mb: *(\d+)")
_COVERAGE: Final = re.compile(r"cov: (\d+) ft: (\d+)")
_LEFT: Final = re.compile(r"Test unit written to (\S+)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one process did. `finding` is the file of the input that ended it, or empty."""

    target: str
    inputs: int
    seconds: float
    coverage: int
    peak_mib: int
    finding: str


def main() -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together; default: 60")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be repeated")
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"), help="where inputs are kept")
    parser.add_argument("--json", action="store_true", help="one line of JSON for each target instead")
    parser.add_argument(
        "--replay", type=Path, help="run one input through the one --target, and nothing else"
    )
    arguments = parser.parse_args()
    chosen = [TARGETS[name] for name in arguments.target or TARGETS]
    if arguments.replay is not None:
        for target in chosen:
            target.run(arguments.replay.read_bytes())
        return 0
    outcomes = []
    if not arguments.json:
        print(f"{'target':<22}{'inputs':>12}{'a second':>10}{'branches':>10}{'peak MiB':>10}  finding")
    runs = [(target, library) for target in chosen for library in _libraries(target, arguments.corpus)]
    for target, library in runs:
        outcome = run_target(target, arguments.seconds / len(runs), arguments.corpus, library)
        outcomes.append(outcome)
        if arguments.json:
            print(json.dumps(asdict(outcome)), flush=True)
            continue
        print(
            f"{outcome.target:<22}{outcome.inputs:>12,}{outcome.inputs / outcome.seconds:>10,.0f}"
            f"{outcome.coverage:>10}{outcome.peak_mib:>10}  {outcome.finding or 'none'}",
            flush=True,
        )
    if not arguments.json:
        print(f"{'all':<22}{sum(each.inputs for each in outcomes):>12,}")
    found = [each for each in outcomes if each.finding]
    for each in found:
        print(
            f"see it again: python -m tests.fuzz --target {each.target.partition(',')[0]} "
            f"--replay {each.finding}",
            file=sys.stderr,
        )
    return 1 if found else 0


def _libraries(target: Target, directory: Path) -> list[Path | None]:
    """What a target runs on, one after the other: None is the ordinary native library."""
    if not target.is_native:
        return [None]
    directory.mkdir(parents=True, exist_ok=True)
    library = directory.absolute() / "native-sanitised.so"
    trouble = build_sanitised(library)
    if trouble:
        print(f"{target.name}: no run with sanitizers, {trouble}", file=sys.stderr)
    return [None] if trouble else [None, library]


def run_target(target: Target, seconds: float, directory: Path, library: Path | None) -> Outcome:
    """Fuzz one target for about so long, with the corpus kept in `directory`.

    `library`: the native library with sanitizers, if that is to be used.
    """
    corpus, left = directory / "corpus" / target.name, directory / "findings"
    corpus.mkdir(parents=True, exist_ok=True)
    left.mkdir(exist_ok=True)
    for seed in target.seeds():
        (corpus / f"seed-{hashlib.sha256(seed).hexdigest()[:16]}").write_bytes(seed)
    started = time.monotonic()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.one_target", target.name),
            str(library or ""),
            str(corpus),
            f"-max_total_time={max(1, round(seconds))}",
            f"-max_len={target.size_bytes_max}",
            f"-timeout={INPUT_TIMEOUT_S}",
            f"-rss_limit_mb={RESIDENT_MIB_MAX}",
            f"-artifact_prefix={left}/{target.name}-",
            *("-print_final_stats=1", "-reload=0"),
        ],
        env=None if library is None else sanitised_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds + SLACK_S,
        check=False,
    )
    text = ended.stdout.decode(errors="replace")
    found = _LEFT.findall(text)
    if ended.returncode != 0 or "runtime error:" in text or "AddressSanitizer" in text:
        log = left / f"{target.name}.log"
        log.write_text(text)
        found = found or [str(log)]
    branches = _COVERAGE.findall(text)
    return Outcome(
        target=target.name if library is None else f"{target.name}, sanitised",
        inputs=sum(map(int, _EXECUTED.findall(text))),
        seconds=time.monotonic() - started,
        coverage=int(branches[-1][0]) if branches else 0,
        peak_mib=max(map(int, _PEAK.findall(text)), default=0),
        finding=found[-1] if found else "",
    )


if __name__ == "__main__":
    sys.exit(main())
