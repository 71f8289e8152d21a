"""`python deploy/demo-model STAGE WORK_DIRECTORY`: one stage of making the demo model.

Decides which files of the work directory a stage reads and writes; what a stage does is in its
own module. `verify` runs under the project's environment (it needs llama.cpp), all others under
the scratch environment of requirements.txt, so each stage imports only what it needs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "kvasir_node" / "data" / "demo-q8_0.gguf"


def corpus_stage(work: Path, options: argparse.Namespace) -> None:
    """packages/ -> corpus.json, corpus-statistics.json"""
    import corpus

    split = corpus.split_by_key(corpus.read_corpus(work / "packages"))
    corpus.write_split(split, work / "corpus.json")
    table = corpus.statistics(split)
    (work / "corpus-statistics.json").write_text(json.dumps(table, indent=2) + "\n")
    for side, sources in table.items():
        print(side, {source: count["size_bytes"] for source, count in sources.items()})


def tokenizer_stage(work: Path, options: argparse.Namespace) -> None:
    """corpus.json -> tokenizer.json, train.npz, held_out.npz"""
    import corpus
    import tokenizer

    split = corpus.read_split(work / "corpus.json")
    trained = tokenizer.train_tokenizer(document.text for document in split.train)
    trained.save(str(work / "tokenizer.json"))
    for side, documents in (("train", split.train), ("held_out", split.held_out)):
        array = tokenizer.tokenize(trained, documents)
        array.save(work / f"{side}.npz")
        size_bytes = sum(document.size_bytes for document in documents)
        print(f"{side}: {len(array.ids)} tokens, {size_bytes / len(array.ids):.3f} bytes a token")


def cloze_stage(work: Path, options: argparse.Namespace) -> None:
    """corpus.json, tokenizer.json -> held-out.txt, cloze.jsonl (both ship with the model)"""
    import cloze
    import corpus

    held_out = corpus.read_split(work / "corpus.json").held_out
    size_bytes, n_item = cloze.write(
        held_out, cloze.words_of(work / "tokenizer.json"), work / "held-out.txt", work / "cloze.jsonl"
    )
    print(f"held-out.txt: {size_bytes} bytes; cloze.jsonl: {n_item} items")


def train_stage(work: Path, options: argparse.Namespace) -> None:
    """train.npz, held_out.npz -> weights.pt, results/loss-curve.csv (resumes from checkpoint.pt)"""
    import torch
    import train

    torch.set_num_threads(options.threads)
    curve_path = options.results / "loss-curve.csv"
    train.Training(work, train.Recipe(), curve_path).run(options.pause_file)


def baseline_stage(work: Path, options: argparse.Namespace) -> None:
    """train.npz, held_out.npz, corpus-statistics.json -> results/kneser-ney.json"""
    import kneser_ney
    import numpy as np

    with np.load(work / "train.npz") as train, np.load(work / "held_out.npz") as held_out:
        trained_on, measured_on = train["ids"].astype(np.int64), held_out["ids"].astype(np.int64)
    sources = json.loads((work / "corpus-statistics.json").read_text())["held_out"]
    size_bytes = sum(source["size_bytes"] for source in sources.values())
    figures = kneser_ney.measure(trained_on, measured_on, size_bytes)
    (options.results / "kneser-ney.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))


def export_stage(work: Path, options: argparse.Namespace) -> None:
    """weights.pt, tokenizer.json -> demo-f32.gguf, demo-q8_0.gguf"""
    import export

    for name, quantised in (("demo-f32.gguf", False), ("demo-q8_0.gguf", True)):
        export.write_gguf(work / "weights.pt", work / "tokenizer.json", work / name, quantised)
        print(name, (work / name).stat().st_size, "bytes")


def import_stage(work: Path, options: argparse.Namespace) -> None:
    """The shipped GGUF (--gguf) -> weights.pt, demo-f32.gguf, and demo-q8_0.gguf as it is

    In place of training and export, to measure weights that exist.
    """
    import export
    import torch

    torch.save(export.read_weights(options.gguf), work / "weights.pt")
    export.write_gguf(work / "weights.pt", work / "tokenizer.json", work / "demo-f32.gguf", False)
    shutil.copyfile(options.gguf, work / "demo-q8_0.gguf")


def reference_stage(work: Path, options: argparse.Namespace) -> None:
    """weights.pt, corpus.json, the token arrays -> reference.npz, results/reference.json"""
    import reference
    import torch

    torch.set_num_threads(options.threads)
    reference.measure(work, options.results)


def verify_stage(work: Path, options: argparse.Namespace) -> None:
    """The GGUF files and what the reference stage wrote -> results/verify.json"""
    import verify

    document = verify.verify(work, options.results, options.threads)
    print(json.dumps({name: value for name, value in document.items() if name != "samples"}))


def plot_stage(work: Path, options: argparse.Namespace) -> None:
    """results/loss-curve.csv, results/kneser-ney.json -> results/loss-curve.svg"""
    import plot

    plot.write_plot(options.results)


STAGES: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "corpus": corpus_stage,
    "tokenizer": tokenizer_stage,
    "cloze": cloze_stage,
    "train": train_stage,
    "baseline": baseline_stage,
    "export": export_stage,
    "import": import_stage,
    "reference": reference_stage,
    "verify": verify_stage,
    "plot": plot_stage,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="deploy/demo-model", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("work", type=Path, help="the work directory")
    parser.add_argument("--results", type=Path, help="where figures go (default WORK/results)")
    parser.add_argument("--gguf", type=Path, default=SHIPPED, help="import: the file to read")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default 2)")
    parser.add_argument("--pause-file", type=Path, help="train: rest between steps while it exists")
    options = parser.parse_args(arguments)
    options.results = options.results or options.work / "results"
    options.results.mkdir(parents=True, exist_ok=True)
    STAGES[options.stage](options.work, options)


if __name__ == "__main__":
    main(sys.argv[1:])
