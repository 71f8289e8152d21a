"""Workers of three kinds of arithmetic in one swarm: ggml, an OpenCL device, and an ARM processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from kvasir_proto.swarm_manifest import Thresholds
from tests.loopback.daemons import run_session
from tests.loopback.mixed_swarm import KERNELS, MixedSwarm, why_not

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

PROMPT = tuple(range(100, 148))
N_TOKENS = 8


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[MixedSwarm]:
    made = MixedSwarm(tmp_path)
    yield made
    made.close()


def test_unlike_workers_serve_one_model_within_tolerance(swarm: MixedSwarm) -> None:
    before = swarm.rows_of_workers()
    tokens = trio.run(run_session, swarm.founder, N_TOKENS)
    assert len(tokens) == N_TOKENS
    token_ids = (*PROMPT, *tokens)
    comparison = swarm.compare(token_ids, (len(PROMPT), *[1] * N_TOKENS))
    # It may be 0: the trunk rounds rows to eight bits, and swallows last bits that flip none.
    assert comparison.mean_kld <= Thresholds().mean_kld_max
    assert comparison.top1_agreement >= 1 - 1.5 / len(token_ids), "one borderline token at most"
    after = swarm.rows_of_workers()
    for kernel in KERNELS:
        assert after[kernel] > before[kernel] + len(token_ids), f"{kernel} was hardly asked"
    members = {each["backend"]: each for each in swarm.founder.wait_state("ready")["members"]}
    assert set(members) == set(KERNELS)
