"""The bar of the spine: a swarm of real processes gives the very logits of a single process.

For each expert type one reference run, then swarms of 1, 2, 3 and 5 workers with one holder an expert, so
that every expert lives in one place only. 660 positions, past the 512 at which single-token attention
switches kernels, in prefill of several sizes and in decode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest
import trio

from kvasir_node.local_swarm import RunSettings, evaluate_logits, start_local_swarm, start_reference
from kvasir_node.measure.logits import count_ubatches, random_tokens
from kvasir_node.model.store import ModelStore
from tests.model_makers import ModelShape, make_qwen3moe, quantise

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

SHAPE: Final = ModelShape(n_layer=3, n_embd=256, n_ff=256, n_expert=16, n_expert_used=4)
SETTINGS: Final = RunSettings(n_ctx=1024, n_ubatch=128)
POSITIONS: Final = 660
CHUNKS: Final = (256, 200, 9, 8, 3, *([1] * (POSITIONS - 476)))
WORKERS: Final = (1, 2, 3, 5)


@pytest.mark.parametrize("expert_type", ["F32", "Q8_0", "Q4_K_M"])
def test_sharded_experts_give_the_bits_of_a_single_process(expert_type: str, tmp_path: Path) -> None:
    path = make_qwen3moe(tmp_path / "source.gguf", SHAPE)
    if expert_type != "F32":
        path = quantise(path, tmp_path / "model.gguf", expert_type)
    trio.run(_compare, path, tmp_path)


async def _compare(path: Path, directory: Path) -> None:
    model = ModelStore(directory / "models").add(path)
    tokens = random_tokens(POSITIONS, model.manifest.n_vocab, seed=5)
    async with trio.open_nursery() as nursery:
        reference, _ = await start_reference(nursery, model, SETTINGS, directory)
        await evaluate_logits(reference, tokens, CHUNKS, directory / "single.npy")
        await reference.close()
        single = np.load(directory / "single.npy")
        assert np.isfinite(single).all()
        for n_workers in WORKERS:
            swarm = await start_local_swarm(
                nursery, model, SETTINGS, directory, n_workers=n_workers, holders=1
            )
            evaluated = await evaluate_logits(swarm.backbone, tokens, CHUNKS, directory / "swarm.npy")
            shared = np.load(directory / "swarm.npy")
            assert float(np.abs(shared - single).max()) == 0.0, f"{n_workers} workers"
            assert (shared.argmax(axis=1) == single.argmax(axis=1)).all()
            ubatches = count_ubatches(CHUNKS, SETTINGS.n_ubatch)
            assert evaluated.hook_calls == ubatches * len(model.manifest.moe_layers)
            assert evaluated.rows_retried == 0
            for engine in (swarm.backbone, *swarm.workers):
                await engine.close()
