"""`python -m tests.llama_perplexity PROGRAM`: our statistics beside llama-perplexity's, as a table.

llama-perplexity keeps a base's logarithms of probabilities in 16 bits. So there are three columns: what it
printed, what its formulas make of our logits when the base is stored as it stores it (a slow twin, in its own
floats), and our statistics, of whole logits. The first two are equal but for the last digit that is printed;
the third is as far away as the stored steps allow.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import numpy.typing as npt

from kvasir_node.engine.llama_log import capture_llama_log
from kvasir_node.measure.in_process import InProcessModel, ModelSettings
from kvasir_node.measure.recording import cut_into_windows
from kvasir_node.measure.statistics import Logits, LogitsComparison, compare_logits
from kvasir_node.measure.task import HELD_OUT_TEXT
from kvasir_node.model.store import DEMO_MODEL, ModelStore, StoredModel
from kvasir_node.telemetry import configure_telemetry

WINDOW: Final = 512
UBATCH: Final = 256
PROGRAM_TIMEOUT_S: Final = 600.0
PRINTS_MAX: Final = 20
"""On a busy machine it ends before its log's thread has printed everything: then it is asked again."""
_SPREAD: Final = 16.0
"""Base logits further below the largest are all stored as that far below it."""
_STEPS: Final = 65535

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Statistic:
    """One line: its value and what stands behind ±, by the name that llama-perplexity prints."""

    value: float
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both programs' figures. `steps` are the sizes of the stored steps, one a scored position, `tied` the
    positions whose best two tokens fall into one of them; `same_stored` is the share of stored values that
    are those in llama-perplexity's file, `stored_apart` by how many steps others differ at most.
    """

    printed: dict[str, Statistic]
    stored: dict[str, Statistic]
    ours: dict[str, Statistic]
    comparison: LogitsComparison
    steps: Doubles
    tied: int
    same_stored: float
    stored_apart: int


def compare_with_program(program: Path, model: StoredModel, directory: Path, n_windows: int) -> Comparison:
    """Base: F32 keys and values and plain attention. Run: F16 and flash attention."""
    text = HELD_OUT_TEXT
    base_file = directory / "base.kld"
    common = [program, "-m", model.reference_path(), "-f", text, "--no-escape", "-c", WINDOW, "-b", WINDOW]
    common += ["-ub", UBATCH, "-t", 1, "--chunks", n_windows, "--kl-divergence-base", base_file]
    _run_program([*common, "-ctk", "f32", "-ctv", "f32", "-fa", "off"])
    printed = _printed([*common, "-ctk", "f16", "-ctv", "f16", "-fa", "on", "--kl-divergence"])
    windows, base = _logits_of(model, n_windows, ModelSettings(WINDOW, UBATCH, 1, "f32", False))
    _, run = _logits_of(model, n_windows, ModelSettings(WINDOW, UBATCH, 1, "f16", True))
    tokens = [token for window in windows for token in window]
    comparison = compare_logits(base, run, tokens, [WINDOW] * n_windows, "second-half")
    scored = [
        start + index for start in range(0, len(tokens), WINDOW) for index in range(WINDOW // 2, WINDOW - 1)
    ]
    following = np.array([tokens[index + 1] for index in scored])
    numbers, steps, log_p = stored_base(base[scored])
    theirs = _numbers_in(base_file, n_windows, base.shape[1])
    apart = np.abs(numbers.astype(np.int64) - theirs.astype(np.int64))
    return Comparison(
        printed=printed,
        stored=their_statistics(log_p, run[scored], following),
        ours=our_statistics(comparison),
        comparison=comparison,
        steps=steps,
        tied=int(np.sum(np.sum(numbers == _STEPS, axis=1) > 1)),
        same_stored=float(np.mean(apart == 0)),
        stored_apart=int(apart.max()),
    )


def _printed(arguments: Sequence[object]) -> dict[str, Statistic]:
    for _ in range(PRINTS_MAX):
        found = parse(_run_program(arguments))
        if "Same top p" in found:  # the last line
            return found
    raise RuntimeError(f"llama-perplexity did not print all it should in {PRINTS_MAX} runs")


def _run_program(arguments: Sequence[object]) -> str:
    ended = subprocess.run(
        [str(each) for each in arguments],
        capture_output=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    if ended.returncode:
        raise RuntimeError(f"llama-perplexity ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return ended.stdout


def parse(output: str) -> dict[str, Statistic]:
    """The statistics behind ``====== Perplexity statistics``; shares of one, where it prints per cent."""
    found = {}
    for line in output.partition("====== Perplexity statistics")[2].splitlines():
        name, colon, rest = line.rpartition(":")
        numbers = re.findall(r"-?\d+\.\d+", rest)
        if not colon or not numbers:
            continue
        scale = 100.0 if "%" in rest else 1.0
        values = [float(each) / scale for each in numbers]
        found[" ".join(name.split())] = Statistic(*values[:2])
    return found


def _logits_of(
    model: StoredModel, n_windows: int, settings: ModelSettings
) -> tuple[tuple[tuple[int, ...], ...], Logits]:
    with InProcessModel(model, settings, is_watched=False) as loaded:
        tokens, beginning = loaded.tokenize(HELD_OUT_TEXT.read_text(encoding="utf-8")), loaded.tokenize("")
        windows = cut_into_windows(tokens, n_windows * WINDOW, WINDOW, beginning)
        return windows, np.concatenate([loaded.evaluate(each, (len(each),))[0] for each in windows])


def stored_base(logits: Logits) -> tuple[npt.NDArray[np.uint16], Doubles, npt.NDArray[np.float32]]:
    """The numbers that are stored, their steps, and the logarithms of probabilities that are read back."""
    highest = logits.max(axis=1, keepdims=True)
    lowest = np.maximum(logits.min(axis=1, keepdims=True), highest - np.float32(_SPREAD))
    powers = np.exp(logits - highest).astype(np.float64).sum(axis=1, keepdims=True)
    log_sum = np.log(powers).astype(np.float32)
    least = lowest - highest - log_sum
    step = (highest - lowest) / np.float32(_STEPS)
    numbers = np.where(logits > lowest, np.rint((np.float32(1) / step) * (logits - lowest)), 0)
    return (
        numbers.astype(np.uint16),
        step[:, 0].astype(np.float64),
        (step * numbers.astype(np.float32) + least).astype(np.float32),
    )


def _numbers_in(path: Path, n_windows: int, n_vocab: int) -> npt.NDArray[np.uint16]:
    """The numbers in a file that ``--kl-divergence-base`` wrote."""
    data = path.read_bytes()
    if data[:8] != b"_logits_" or np.frombuffer(data, np.int32, 3, 8).tolist() != [
        WINDOW,
        n_vocab,
        n_windows,
    ]:
        raise RuntimeError(f"{path} is not what was asked for")
    width = 2 * ((n_vocab + 1) // 2) + 4
    begin = 8 + 3 * 4 + 4 * WINDOW * n_windows
    rows = np.frombuffer(data, np.uint16, -1, begin).reshape(-1, width)
    return rows[:, 4 : 4 + n_vocab]


def their_statistics(
    base_log_p: npt.NDArray[np.float32], run: Logits, following: npt.NDArray[np.int64]
) -> dict[str, Statistic]:
    """llama-perplexity's own formulas, written from its source."""
    highest = run.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(run - highest).astype(np.float64).sum(axis=1, keepdims=True)).astype(np.float32)
    run_log_p = run - (highest + log_sum)
    rows = np.arange(len(run))
    counted = base_log_p > np.float32(-_SPREAD)
    terms = np.exp(base_log_p) * (base_log_p - run_log_p)
    kld = np.where(counted, terms, 0).astype(np.float64).sum(axis=1)
    nll_base = -base_log_p[rows, following].astype(np.float64)
    nll = -run_log_p[rows, following].astype(np.float64)
    delta_p = np.exp(-nll) - np.exp(-nll_base)
    same = np.argmax(run, axis=1) == np.argmax(base_log_p, axis=1)

    def error(values: Doubles) -> float:
        return math.sqrt(float(np.var(values)) / (len(values) - 1))

    def mean(values: Doubles) -> Statistic:
        return Statistic(float(np.mean(values)), error(values))

    covariance = (np.mean(nll * nll_base) - np.mean(nll) * np.mean(nll_base)) / (len(nll) - 1)
    run_error, base_error = error(nll), error(nll_base)
    ratio = float(np.mean(nll) - np.mean(nll_base))
    ratio_error = math.sqrt(run_error**2 + base_error**2 - 2 * covariance)
    perplexity, base_perplexity = math.exp(np.mean(nll)), math.exp(np.mean(nll_base))
    difference_error = math.sqrt(
        (perplexity * run_error) ** 2
        + (base_perplexity * base_error) ** 2
        - 2 * perplexity * base_perplexity * covariance
    )
    square = delta_p * delta_p
    rms = math.sqrt(np.mean(square))
    found = {
        "Mean PPL(Q)": Statistic(perplexity, perplexity * run_error),
        "Mean PPL(base)": Statistic(base_perplexity, base_perplexity * base_error),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": Statistic(covariance / (run_error * base_error)),
        "Mean ln(PPL(Q)/PPL(base))": Statistic(ratio, ratio_error),
        "Mean PPL(Q)/PPL(base)": Statistic(math.exp(ratio), math.exp(ratio) * ratio_error),
        "Mean PPL(Q)-PPL(base)": Statistic(perplexity - base_perplexity, difference_error),
        "Mean KLD": mean(kld),
        "Mean Δp": mean(delta_p),
        "RMS Δp": Statistic(rms, error(square) / (2 * rms)),
        "Same top p": mean(same.astype(np.float64)),
    }
    percents = (100.0, 99.9, 99.0, 95.0, 90.0, 75.0, 50.0, 25.0, 10.0, 5.0, 1.0, 0.1, 0.0)
    for name, values in (("KLD", kld), ("Δp", delta_p)):
        for percent in percents:
            word = {100.0: "Maximum", 50.0: "Median", 0.0: "Minimum"}.get(percent, f"{percent:.1f}%")
            found[f"{word} {name}"] = Statistic(float(np.quantile(values, percent / 100)))
    return found


def our_statistics(found: LogitsComparison) -> dict[str, Statistic]:
    """What `measure logits` says, by the same names."""
    values: dict[str, Any] = dataclasses.asdict(found)
    names = {
        "Mean PPL(Q)": "run_perplexity",
        "Mean PPL(base)": "base_perplexity",
        "Cor(ln(PPL(Q)), ln(PPL(base)))": "ln_ppl_correlation",
        "Mean ln(PPL(Q)/PPL(base))": "mean_ln_ppl_ratio",
        "Mean PPL(Q)-PPL(base)": "perplexity_difference",
        "Mean KLD": "mean_kld",
        "Maximum KLD": "maximum_kld",
        "99.0% KLD": "kld_99",
        "Median KLD": "median_kld",
        "Minimum KLD": "minimum_kld",
        "Mean Δp": "mean_delta_p",
        "RMS Δp": "rms_delta_p",
        "Maximum Δp": "maximum_delta_p",
        "Median Δp": "median_delta_p",
        "Minimum Δp": "minimum_delta_p",
        "Same top p": "top1_agreement",
    }
    figures = {shown: Statistic(values[name], values.get(f"{name}_error")) for shown, name in names.items()}
    figures["Mean PPL(Q)/PPL(base)"] = Statistic(
        1 + values["perplexity_change"], values["perplexity_ratio_error"]
    )
    for shown, name in (("KLD", "kld_percentiles"), ("Δp", "delta_p_percentiles")):
        figures |= {f"{percent}% {shown}": Statistic(each) for percent, each in values[name].items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=Path, help="llama-perplexity")
    parser.add_argument("--windows", type=int, default=16)
    arguments = parser.parse_args()
    configure_telemetry("warning", "console", {})
    capture_llama_log()
    with tempfile.TemporaryDirectory() as name:
        model = ModelStore(Path(name) / "models").add(DEMO_MODEL)
        found = compare_with_program(arguments.program.resolve(), model, Path(name), arguments.windows)
    click.echo("| statistic | llama-perplexity | its formulas, base stored as it does | ours, whole logits |")
    click.echo("| --- | --- | --- | --- |")
    for name, printed in found.printed.items():
        cells = [_cell(each[name]) if name in each else "" for each in (found.stored, found.ours)]
        click.echo(f"| {name} | {_cell(printed)} | {cells[0]} | {cells[1]} |")
    click.echo(
        f"\n{len(found.steps)} positions; stored steps {found.steps.mean():.2e} on average, "
        f"{found.steps.max():.2e} at most; {found.tied} positions have their best two tokens in one step; "
        f"{100 * found.same_stored:.4f} % of stored numbers are those in its file, others are "
        f"{found.stored_apart} apart at most"
    )


def _cell(each: Statistic) -> str:
    return f"{each.value:.8f}" + ("" if each.error is None else f" ± {each.error:.8f}")


if __name__ == "__main__":
    main()
