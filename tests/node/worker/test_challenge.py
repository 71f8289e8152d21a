"""An auditor's challenge over real TLS: honest kernels pass, liars are found out, the rest fails closed."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kvasir_node.kernels.accumulators import F16_SUMS
from kvasir_node.kernels.addressed_arrays import array_at
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.liars import LIES, LyingKernel
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.worker import challenge as module
from kvasir_node.worker import engine as engine_module
from kvasir_node.worker.challenge import BATCHES, challenge
from kvasir_proto import dispatch
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.messages.engine import ChallengeHolder, HolderChallenged, SetFence
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.tls_ends import backbone_end, worker_end
from tests.node.worker.test_engine import HOST, NODE, Worker

N_ROWS = sum(BATCHES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, ModelManifest]:
    """(model file, manifest file, manifest) of two layers with four experts, as wide as the demo model."""
    directory = tmp_path_factory.mktemp("model")
    shape = ModelShape(n_layer=2, n_expert=4, n_embd=256, n_ff=128)
    path = make_qwen3moe(directory / "model.gguf", shape)
    manifest = build_manifest(path)
    manifest_path = directory / "manifest"
    manifest_path.write_bytes(manifest.encode())
    return path, manifest_path, manifest


Make = Callable[..., ExpertKernel]


@pytest.fixture
def serve(
    model: tuple[Path, Path, ModelManifest], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Make | None], Worker]]:
    """A worker that holds experts 0 to 2 of both layers in the kernel that this makes, and listens."""
    workers: list[Worker] = []

    def start(make: Make | None = None) -> Worker:
        if make is not None:
            monkeypatch.setattr(
                engine_module,
                "make_kernel",
                lambda _name, manifest, shard, read, threads, _device: make(manifest, shard, read, threads),
            )
        worker = Worker(model)
        workers.append(worker)
        worker.engine.handle(SetFence(0, 1))
        worker.load(0, 1, 2)
        worker.listen()
        return worker

    yield start
    for each in workers:
        each.close()


def asked(worker: Worker, **changes: Any) -> ChallengeHolder:
    values: dict[str, Any] = {
        "request": 3,
        "node_id": NODE,
        "host": HOST,
        "port": worker.port,
        "token": b"",
        "certificate": worker_end().certificate,
        "epoch": 0,
        "term": 1,
        "proof": b"proof",
        "manifest_path": str(worker.manifest_path),
        "source_path": str(worker.source_path),
        "shard": ShardSet.from_pairs([(0, 1), (1, 2)]).encode(),
        "activation": "",
        "seed": 7,
    }
    values |= changes
    values["token"] = values["token"] or worker.expect()
    return ChallengeHolder(**values)


def found(worker: Worker, **changes: Any) -> HolderChallenged:
    return challenge(asked(worker, **changes), backbone_end().credentials)


def test_an_honest_kernel_is_verified_and_another_seed_is_other_evidence(
    serve: Callable[..., Worker],
) -> None:
    worker = serve()
    first, second = found(worker), found(worker, seed=8)
    for each in (first, second):
        assert (each.outcome, each.n_rows, each.request) == ("verified", 2 * N_ROWS, 3), each.reason
        assert each.reason == f"{2 * N_ROWS} rows, experts asked: 2"
    assert first.evidence != second.evidence
    worker.wait(lambda: worker.statistics()["connections"] == 0)  # it hangs up


EXPECTED = {"f16": "unfit"} | dict.fromkeys(("scaled", "zeros", "stale", "nan", "replayed"), "quarantined")


@pytest.mark.parametrize("lie", [each for each in LIES if each in EXPECTED])
def test_a_liar_is_found_out(serve: Callable[..., Worker], lie: Any) -> None:
    worker = serve(lambda manifest, shard, read, threads: LyingKernel(lie, manifest, shard, read, threads))
    heard = found(worker)
    assert heard.outcome == EXPECTED[lie], heard.reason
    assert "rows are wrong" in heard.reason


class _Constant(GgmlCpuKernel):
    """The same row for everything."""

    def compute(self, *args: Any, **call: Any) -> None:
        super().compute(*args, **call)
        width = self.row_widths(call["layer"], call["program_index"])[1]
        array_at(call["out_address"], np.float32, call["n_pairs"], width)[:] = 0.5


def test_constant_rows_are_of_no_kernel(serve: Callable[..., Worker]) -> None:
    worker = serve(lambda manifest, shard, read, threads: _Constant(manifest, shard, read, threads=threads))
    assert found(worker).outcome == "quarantined"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an expert that it does not hold": (
        {"shard": ShardSet.from_pairs([(0, 3)]).encode()},
        "not held|foreign|expert",
    ),
    "a term that is over": ({"term": 7}, "not the proven term"),
    "a token that was used": ({"token": b"x" * 16}, "."),
    "nobody there": ({"port": 1}, "."),
    "another certificate": ({"certificate": backbone_end().certificate}, "certificate"),
    "no experts": ({"shard": ShardSet().encode()}, "0 experts"),
    "rows in a format that nobody knows": ({"activation": "FP4"}, "FP4"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_asked_verifies_nothing(serve: Callable[..., Worker], what: str) -> None:
    changes, reason = REFUSED[what]
    worker = serve()
    heard = found(worker, **changes)
    assert heard.outcome == "inconclusive"
    assert heard.n_rows == 0
    assert re.search(reason, heard.reason), heard.reason


def test_answers_that_are_late_or_of_something_else_verify_nothing(
    serve: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = serve()
    with monkeypatch.context() as patch:
        digest = dispatch.reply_digest

        def lie(request: bytes, rows: bytes) -> bytes:
            is_worker = threading.current_thread().name == "connection"
            return bytes(32) if is_worker else digest(request, rows)

        patch.setattr(dispatch, "reply_digest", lie)
        heard = found(worker)
        assert (heard.outcome, heard.n_rows) == ("inconclusive", 0), heard.reason
        assert "digest" in heard.reason
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", -1.0)
    heard = found(worker)
    assert heard.outcome == "inconclusive"
    assert "no answer" in heard.reason


def test_rows_that_would_not_show_short_sums_verify_nobody(
    serve: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "F16_SUMS", None)  # sums in F32, then
    heard = found(serve())
    assert heard.outcome == "inconclusive"
    assert "would not have shown" in heard.reason


def test_what_takes_long_is_asked_of_fewer_experts_and_of_one_at_least(
    serve: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUDGET_S", 0.0)
    heard = found(serve())
    assert (heard.outcome, heard.n_rows) == ("verified", N_ROWS)


def test_one_row_short_in_a_large_batch_alone_is_seen(serve: Callable[..., Worker]) -> None:
    """A device that adds in F16 from 64 rows on, and in F32 below."""

    def make(manifest: ModelManifest, shard: ShardSet, read: Any, threads: int) -> ExpertKernel:
        honest = GgmlCpuKernel(manifest, shard, read, threads=threads)
        short = ReferenceKernel(manifest, shard, read, Arithmetic.AS_GGML, F16_SUMS)

        class Mixed:
            backend, memory_bytes = honest.backend, honest.memory_bytes

            def add_program(self, program: Any) -> int:
                assert honest.add_program(program) == short.add_program(program)
                return honest.add_program(program)

            def row_widths(self, layer: int, program_index: int) -> tuple[int, int]:
                return honest.row_widths(layer, program_index)

            def compute(self, **call: Any) -> None:
                kernel = short if call["n_pairs"] >= 64 else honest
                kernel.compute(**call)

            def close(self) -> None:
                honest.close()
                short.close()

        return cast(ExpertKernel, Mixed())

    assert found(serve(make)).outcome == "unfit"


def test_the_engine_does_it_beside_its_other_work(serve: Callable[..., Worker]) -> None:
    worker = serve()
    auditor = Worker((worker.source_path, worker.manifest_path, worker.manifest))
    try:
        token = worker.expect(worker_end())
        auditor.engine.handle(asked(worker, token=token))
        heard = auditor.control.receive()
        assert isinstance(heard, HolderChallenged)
        assert heard.outcome == "verified", heard.reason
    finally:
        auditor.close()
