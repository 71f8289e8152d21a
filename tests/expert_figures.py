"""Figures of experts from member to member: how fast, for how much processor time, and what others wait.

`python -m tests.expert_figures DIRECTORY [MIB] [RATE...]` writes a model of about that size there (256 MiB),
starts a node that gives (a process of its own) for each rate in MiB a second (16 and as fast as it goes), has
this process fetch every expert over libp2p on the loopback interface, and prints one JSON object. How late a
task of the giving process is that wants to wake every 5 ms says what a lease's renewal would have waited.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import trio

from kvasir_node.app import now
from kvasir_node.bench.test_model import BENCH_SHAPE, write_test_model
from kvasir_node.driver.expert_asking import ExpertAsker, Givers
from kvasir_node.driver.expert_giving import ExpertGiver
from kvasir_node.experts_on_disk import ShelfOnDisk
from kvasir_node.model.expert_files import ExpertFiles, slices_of
from kvasir_node.model.expert_intake import ExpertIntake
from kvasir_node.model.manifest_file import read_manifest
from kvasir_node.model.store import ModelStore
from kvasir_node.net.host import Libp2pHost
from kvasir_node.net.identity import load_or_create_identity
from kvasir_node.ports import EXPERTS_PROTOCOL
from kvasir_proto.expert_sources import ExpertRun, WantedExpert
from kvasir_proto.ids import NodeId

TICK_S = 0.005


async def give(directory: Path, mib_per_second: int) -> None:
    """Give until standard input ends; then say what it cost."""
    model = ModelStore(directory / "models").list()[0]
    late_s: list[float] = []

    async def tick() -> None:
        while True:
            wanted = trio.current_time() + TICK_S
            await trio.sleep_until(wanted)
            late_s.append(trio.current_time() - wanted)

    async with Libp2pHost(load_or_create_identity(directory / "giver.key")) as host:
        giver = ExpertGiver(
            model.manifest.digest(), ShelfOnDisk(model), lambda _: True, mib_per_second << 20, now
        )
        host.set_stream_handler(giver.serve_stream, EXPERTS_PROTOCOL)
        sys.stdout.write(host.addresses()[0] + "\n")
        sys.stdout.flush()
        begin = time.process_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            await trio.to_thread.run_sync(sys.stdin.read)
            nursery.cancel_scope.cancel()
        late_s.sort()
        figures = {
            "giver_processor_s_per_gb": round((time.process_time() - begin) / giver.given_bytes * 1e9, 2),
            "tick_late_ms_p50": round(1e3 * late_s[len(late_s) // 2], 2),
            "tick_late_ms_p99": round(1e3 * late_s[len(late_s) * 99 // 100], 2),
            "tick_late_ms_max": round(1e3 * late_s[-1], 2),
        }
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()


async def fetch(directory: Path, address: str) -> dict[str, Any]:
    """Every expert of the model, from the node at this address."""
    model = ModelStore(directory / "models").list()[0]
    manifest = read_manifest(model.manifest_path)
    whole = manifest.whole_shard()
    intake = ExpertIntake(manifest, ExpertFiles(directory / "fetched"), lambda *_: None)

    async def take(run: ExpertRun, offset: int, data: bytes, giver: str) -> tuple[WantedExpert, ...]:
        return await trio.to_thread.run_sync(intake.take, run, offset, data, giver)

    async def reach(node_id: NodeId) -> None:
        await host.connect(address)

    async with Libp2pHost(load_or_create_identity(directory / "asker.key")) as host:
        node_id = NodeId(address.rpartition("/")[2])
        asker = ExpertAsker(manifest.digest(), host, reach, lambda: Givers({node_id: whole}, ()), now)
        begin, processor = time.monotonic(), time.process_time()
        await asker.fetch(intake.wanted(slices_of(manifest, whole)), take)
        took_s = time.monotonic() - begin
    size_bytes = manifest.shard_size_bytes(whole)
    assert intake.wanted([]) == []
    assert ExpertFiles(directory / "fetched").missing(manifest, whole) == []
    return {
        "mb": round(size_bytes / 1e6),
        "took_s": round(took_s, 2),
        "mb_per_second": round(size_bytes / 1e6 / took_s, 1),
        "asker_processor_s_per_gb": round((time.process_time() - processor) / size_bytes * 1e9, 2),
    }


def measured(directory: Path, mib_per_second: int) -> dict[str, Any]:
    """One fetch at one rate."""
    command = [sys.executable, "-m", "tests.expert_figures", "--give", str(directory), str(mib_per_second)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as giver:
        assert giver.stdin is not None
        assert giver.stdout is not None
        # What is logged comes there too.
        address = next(each.strip() for each in giver.stdout if each.startswith("/"))
        figures = trio.run(fetch, directory, address)
        giver.stdin.close()
        cost = next(each for each in giver.stdout if each.startswith("{"))
        figures |= cast("dict[str, Any]", json.loads(cost))
    for path in sorted((directory / "fetched").rglob("*"), reverse=True):
        if path.is_file():
            path.unlink()
    return {"rate_mib_per_second": mib_per_second} | figures


def main() -> None:
    """Print the figures."""
    if sys.argv[1] == "--give":
        trio.run(give, Path(sys.argv[2]), int(sys.argv[3]))
        return
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    mib = int(sys.argv[2]) if len(sys.argv) > 2 else 256
    source = directory / "bench.gguf"
    if not source.exists():
        # A layer of the bench's model has about 105 MiB of experts.
        write_test_model(source, replace(BENCH_SHAPE, n_layer=max(1, mib // 105)))
    ModelStore(directory / "models").add(source)
    rates = [int(each) for each in sys.argv[3:]] or [16, 1 << 20]
    sys.stdout.write(json.dumps([measured(directory, each) for each in rates], indent=1) + "\n")


if __name__ == "__main__":
    main()
