"""Figures of taking in models: memory and speed of one pass, and what comes over HTTP to how many nodes.

`python -m tests.pull_figures DIRECTORY` writes a model of 1.3 GB and a sparse one of 9 GB there, serves the
first from this process with 20 cuts at random places and one damaged mirror, and prints one JSON object.
Every command that is measured is a process of its own, whose peak of memory is its own.
"""

from __future__ import annotations

import json
import mmap
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from kvasir_node.bench.test_model import BENCH_SHAPE, write_test_model
from kvasir_node.model.gguf_format import ALIGNMENT_DEFAULT
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_writer import lay_out, new_file
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from tests.node.model.misbehaving_server import Answering, MisbehavingServer, serving

N_CUTS = 20
N_HOLDER = 3

PEAK = """
import re

def peak_mib():  # of this program alone: ru_maxrss begins with its parent's
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", file.read())[1]) >> 10
"""

MEASURED = (
    PEAK
    + """
import json, sys, time
from kvasir_node.cli import main
begin = time.monotonic()
status = main(sys.argv[1:])
took_s, processor_s = time.monotonic() - begin, time.process_time()
print(json.dumps({
    "status": status,
    "took_s": round(took_s, 2),
    "processor_s": round(processor_s, 2),
    "peak_mib": peak_mib(),
}), file=sys.stderr)
"""
)

PASS = (
    PEAK
    + """
import json, pathlib, sys, time
from kvasir_node.model.model_manifest import build_manifest
before = peak_mib()
begin = time.monotonic()
manifest = build_manifest(pathlib.Path(sys.argv[1]))
took_s = time.monotonic() - begin
processor_s = time.process_time()
print(json.dumps({
    "gb": round(manifest.file_size_bytes / 1e9, 2),
    "took_s": round(took_s, 2),
    "processor_s": round(processor_s, 2),
    "mb_per_second": round(manifest.file_size_bytes / 1e6 / took_s),
    "peak_mib": peak_mib(),
    "peak_mib_before": before,
}), file=sys.stderr)
"""
)


def measured(script: str, *arguments: str) -> dict[str, Any]:
    """What a process of its own says of itself in its last line."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return cast("dict[str, Any]", json.loads(done.stderr.decode().splitlines()[-1]))


def call(home: Path, *arguments: str) -> dict[str, Any]:
    """One command of the command line."""
    figures = measured(MEASURED, "--home", str(home), *arguments)
    assert figures.pop("status") == 0, figures
    return figures


def shown(home: Path, name: str) -> dict[str, Any]:
    """What `models show` says."""
    command = [sys.executable, "-m", "kvasir_node", "--home", str(home), "models", "show", name, "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    return cast("dict[str, Any]", json.loads(done.stdout)["model"])


def write_sparse_model(path: Path) -> None:
    """A model of the bench's form with seven times its experts' width, all of it a hole."""
    small = path.with_name("form.gguf")
    write_test_model(small, replace(BENCH_SHAPE, n_layer=12, n_expert=2, n_expert_used=2))
    gguf = read_gguf(small)
    f32, q8_0 = TENSOR_TYPES_BY_NAME["f32"], TENSOR_TYPES_BY_NAME["q8_0"]
    n_expert, n_ff = 2, 112_000
    tensors = []
    for each in gguf.tensors:
        shape = each.shape
        if "_exps" in each.name:
            shape = (n_ff, shape[1], n_expert) if "down" in each.name else (shape[0], n_ff, n_expert)
        tensors.append((each.name, q8_0 if each.type == q8_0 else f32, shape))
    header, _, size_bytes = lay_out(tuple(gguf.metadata.values()), tensors, ALIGNMENT_DEFAULT)
    with new_file(path) as file:
        file.write(header)
        file.truncate(size_bytes)
    small.unlink()


def disk_bytes(directory: Path) -> int:
    """Bytes of blocks that the disk has given away below here."""
    return sum(each.stat().st_blocks * 512 for each in directory.rglob("*") if each.is_file())


def with_cuts(server: MisbehavingServer, size_bytes: int) -> None:
    """From now on answers end at 20 places drawn from the whole file, each once."""
    draws = random.Random(1)
    places = sorted(draws.randrange(size_bytes) for _ in range(N_CUTS))

    def cut(answering: Answering, begin: int, end: int) -> bool:
        inside = [each for each in places if begin < each < end]
        if not inside:
            return False
        places.remove(inside[0])
        answering.part(
            answering.data,
            begin,
            inside[0],
            headers={"Content-Length": str(end - begin)} | _range(answering, begin, end),
        )
        answering.cut()
        return True

    server.behaviour = cut


def _range(answering: Answering, begin: int, end: int) -> dict[str, str]:
    return {"Content-Range": f"bytes {begin}-{end - 1}/{len(answering.data)}"}


def fetched(source: Path, directory: Path) -> dict[str, Any]:
    """A founder that keeps no experts, and holders that fetch a third each with a damaged mirror first."""
    founder, holders = directory / "founder", [directory / f"holder{each}" for each in range(N_HOLDER)]
    saved = directory / "manifest"
    size_bytes = source.stat().st_size
    figures: dict[str, Any] = {"file_bytes": size_bytes}
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        files = {source.name: cast("bytes", data)}
        with serving(files=files) as server:
            url = server.url(source.name).url
            with_cuts(server, size_bytes)
            figures["pull"] = call(founder, "models", "pull", url)
            figures["pull"]["http_bytes_over_file"] = round(server.sent_bytes / size_bytes, 4)
            figures["pull"]["mb_per_second"] = round(size_bytes / 1e6 / figures["pull"]["took_s"])
            others = directory / "none"
            figures["pull_without_experts"] = call(others, "models", "pull", url, "--no-experts")
            call(founder, "models", "show", source.stem, "--save", str(saved))
            figures["verify"] = call(founder, "models", "verify", source.stem)
            manifest = shown(founder, source.stem)
            figures["holders"] = []
            for number, home in enumerate(holders):
                first, last = manifest["n_expert"] * number // 3, manifest["n_expert"] * (number + 1) // 3 - 1
                shard = f"0-{manifest['n_layer'] - 1}:{first}-{last}"
                server.sent_bytes, server.asked = 0, []
                with_cuts(server, size_bytes)
                pulled = call(home, "models", "pull", url, "--manifest", str(saved))
                trunk_bytes = server.sent_bytes
                got = call(home, "models", "shard", source.stem, shard)
                shard_bytes = manifest["expert_bytes"] * (last + 1 - first) // manifest["n_expert"]
                wanted = manifest["data_offset"] + manifest["backbone_bytes"]
                backbone = next(home.rglob("backbone.gguf"))
                figures["holders"].append(
                    {
                        "backbone_fetched_over_trunk": round(trunk_bytes / wanted, 4),
                        "backbone_disk_over_trunk": round(backbone.stat().st_blocks * 512 / wanted, 4),
                        "shard_fetched_over_shard": round((server.sent_bytes - trunk_bytes) / shard_bytes, 4),
                        "shard_disk_over_shard": round(
                            disk_bytes(next(home.rglob("experts"))) / shard_bytes, 4
                        ),
                        "requests": len(server.asked),
                        "mb_per_second": round(shard_bytes / 1e6 / got["took_s"]),
                        "peak_mib": max(pulled["peak_mib"], got["peak_mib"]),
                    }
                )
            figures["damaged"] = damaged_mirror(
                holders[0], source, url, shard=f"0-{manifest['n_layer'] - 1}:60"
            )
    return figures


def damaged_mirror(home: Path, source: Path, url: str, shard: str) -> dict[str, Any]:
    """One shard from a mirror of zeros that stands in the place of the model's own address."""
    zeros = source.with_name("zeros.gguf")
    with zeros.open("wb") as file:
        file.truncate(source.stat().st_size)
    with (
        zeros.open("rb") as nothing,
        mmap.mmap(nothing.fileno(), 0, access=mmap.ACCESS_READ) as data,
        serving(files={source.name: cast("bytes", data)}) as server,
    ):
        entry = next(home.rglob("entry.json"))
        described = json.loads(entry.read_text())
        entry.write_text(json.dumps(described | {"source": server.url(source.name).url}))
        figures = call(home, "models", "shard", source.stem, shard, "--from", url)
        figures["bytes_of_damage"] = server.sent_bytes
        figures["verify_took_s"] = call(home, "models", "verify", source.stem)["took_s"]
    zeros.unlink()
    return figures


def main() -> None:
    """Print the figures."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    source, sparse = directory / "bench.gguf", directory / "sparse.gguf"
    begin = time.monotonic()
    if not source.exists():
        write_test_model(source)
    write_sparse_model(sparse)
    figures = {
        "pass_1_3_gb": measured(PASS, str(source)),
        "pass_9_gb_sparse": measured(PASS, str(sparse)),
        "http": fetched(source, directory),
        "took_s": round(time.monotonic() - begin),
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
