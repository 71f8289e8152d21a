"""`run --kernel opencl` in a real swarm: experts on an OpenCL device, text and logits within tolerance."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvasir_node import app
from kvasir_node.config import load_configuration
from kvasir_node.control import connect_daemon
from kvasir_node.local_swarm import RunSettings, evaluate_logits, start_reference
from kvasir_node.measure.statistics import compare_logits, open_logits
from kvasir_node.model.store import DEMO_MODEL
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_proto.messages.local import EvaluateReply, EvaluateRequest
from kvasir_proto.swarm_manifest import Thresholds
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, run_session
from tests.node.opencl_here import opencl_devices

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

PROMPT = tuple(range(100, 148))
N_TOKENS = 24


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Daemon]]:
    """A founder and one worker, whose experts are on an OpenCL device."""
    devices, reason = opencl_devices()
    if not devices:
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("opencl-swarm") / "f"
    founding = kvasir("--home", str(home), "init", "--found")
    subprocess.run(founding, check=True, capture_output=True, timeout=PATIENCE_S)
    founder = Daemon(home, "--workers-min", "1")
    worker: Daemon | None = None
    try:
        founder.start()
        address = founder.wait(lambda document: document["addresses"], "an address")["addresses"][0]
        worker = Daemon(
            home.with_name("w"), "--join", address, "--ranks", "output,bulk", "--kernel", "opencl"
        )
        worker.start()
        worker.wait_state("ready")
        founder.wait_state("ready")
        yield founder, worker
    finally:
        for each in (worker, founder):
            if each is not None:
                each.end()


def test_it_says_what_it_computes_with(swarm: tuple[Daemon, Daemon]) -> None:
    founder, worker = swarm
    name = opencl_devices()[0][0].word
    own = worker.wait_state("ready")
    assert (own["backend"], own["device"], own["accumulation"]) == ("opencl", name, "F32")
    (seen,) = founder.wait_state("ready")["members"]
    assert (seen["backend"], seen["device"], seen["accumulation"]) == ("opencl", name, "F32")


def test_it_serves_within_tolerance(swarm: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    founder, worker = swarm
    before = worker.wait_state("ready")["engine_statistics"]["rows"]
    tokens = trio.run(run_session, founder, N_TOKENS)
    assert len(tokens) == N_TOKENS
    ours, theirs = tmp_path / "swarm.npy", tmp_path / "single.npy"
    token_ids = (*PROMPT, *tokens)
    chunk_sizes = (len(PROMPT), *([1] * N_TOKENS))
    trio.run(write_logits, founder, EvaluateRequest(token_ids, chunk_sizes, str(ours)), theirs)
    comparison = compare_logits(open_logits(theirs), open_logits(ours), token_ids)
    assert comparison.mean_kld <= Thresholds().mean_kld_max
    assert comparison.top1_agreement >= 1 - 1.5 / len(token_ids), "one borderline token at most"
    after: dict[str, Any] = worker.wait_state("ready")
    assert after["engine_statistics"]["rows"] > before + len(token_ids)
    assert founder.wait_state("ready")["experts_missing_total"] == 0


async def write_logits(founder: Daemon, request: EvaluateRequest, theirs: Path) -> None:
    """The swarm's logits, and those of a single process that computes with ggml alone."""
    async with connect_daemon(founder.locations) as connection:
        with trio.fail_after(PATIENCE_S):
            assert isinstance(await connection.ask(request), EvaluateReply)
    home = app.open_home(founder.locations, load_configuration(founder.locations.config_file, {}))
    model = home.models.list()[0]
    settings = RunSettings(
        n_ctx=model.context_length(home.configuration.engine_context_tokens),
        n_ubatch=home.configuration.engine_ubatch_tokens,
        n_threads=1,
        device="none",
    )
    async with open_unwrapping_nursery() as nursery:
        engine, _ = await start_reference(nursery, model, settings, founder.locations.runtime)
        await evaluate_logits(engine, request.token_ids, request.chunk_sizes, theirs)
        nursery.cancel_scope.cancel()


def test_a_device_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    """With status 6 and before anything is told to anybody; also where there is no PyOpenCL."""
    home = tmp_path / "home"
    founding = kvasir("--home", str(home), "init", "--found", "--model", str(DEMO_MODEL))
    subprocess.run(founding, check=True, capture_output=True, timeout=PATIENCE_S)
    starting = kvasir("--home", str(home), "run", "--kernel", "opencl", "--kernel-device", "no such card")
    done = subprocess.run(starting, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 6
    sentence = done.stderr.decode().splitlines()[-1]
    assert "'no such card'" in sentence or "OpenCL" in sentence
    assert "Traceback" not in done.stderr.decode()
