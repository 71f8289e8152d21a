"""A backbone that holds experts itself, in real engine processes: the very numbers of a single process.

Whether it holds half of them, all of them or, after it let go of them, none again, and also while they are
exchanged under a running decode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import trio

from kvasir_node.local_swarm import (
    LocalSwarm,
    RunSettings,
    evaluate_logits,
    start_local_swarm,
    start_reference,
)
from kvasir_node.measure.logits import random_tokens
from kvasir_node.model.store import ModelStore, StoredModel
from kvasir_node.supervisor import Engine
from kvasir_proto.errors import EngineFailed, ModelUnusable, NoHolderLeft
from kvasir_proto.ids import SessionId
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    Generate,
    LoadOwnShard,
    OwnShardLoaded,
    RemoveHolder,
    SessionEnded,
    TokenEmitted,
)
from kvasir_proto.sampling import SamplingOptions
from tests.model_makers import ModelShape, make_qwen3moe, quantise

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

SHAPE: Final = ModelShape(n_layer=3, n_embd=256, n_ff=256, n_expert=16, n_expert_used=4)
SETTINGS: Final = RunSettings(n_ctx=256, n_ubatch=64)
POSITIONS: Final = 140
CHUNKS: Final = (64, 30, 9, *([1] * (POSITIONS - 103)))
NOTHING: Final = ShardSet()
LOAD_TIMEOUT_S: Final = 60.0
SESSION_TOKENS: Final = 24


class Case:
    """A swarm of one worker that holds everything, and the logits of a single process."""

    def __init__(self, swarm: LocalSwarm, model: StoredModel, directory: Path, single: Any) -> None:
        self.swarm = swarm
        self.backbone = swarm.backbone
        self.model = model
        self.single = single
        self.everything = model.manifest.whole_shard()
        self.half = ShardSet.from_ranges((layer, 0, 8) for layer in model.manifest.moe_layers)
        self._directory = directory
        self.tokens = random_tokens(POSITIONS, model.manifest.n_vocab, seed=5)

    async def logits(self, name: str) -> npt.NDArray[np.float32]:
        path = self._directory / f"{name}.npy"
        await evaluate_logits(self.backbone, self.tokens, CHUNKS, path)
        return np.asarray(np.load(path))

    async def require_exact(self, name: str) -> None:
        assert float(np.abs(await self.logits(name) - self.single).max()) == 0.0, name

    async def hold(self, shard: ShardSet, primary: ShardSet) -> OwnShardLoaded:
        request = LoadOwnShard(
            self.backbone.next_request(),
            self.swarm.backbone_id,
            str(self.model.source_path),
            shard.encode(),
            primary.encode(),
            1,
        )
        return await self.backbone.exchange(request, OwnShardLoaded, LOAD_TIMEOUT_S)

    async def statistics(self) -> dict[str, Any]:
        return dict(json.loads(await self.backbone.statistics_json(10.0)))

    async def own_rows(self) -> int:
        """Rows that the backbone's own experts have computed so far."""
        rows = (await self.statistics())["dispatch"]["rows_by_holder"]
        return int(rows.get(self.swarm.backbone_id, 0))


async def tokens_of(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    """What a session on this engine samples after a prompt."""
    session = SessionId(bytes(16))
    await engine.send(Generate(session, None, prompt, SESSION_TOKENS, SamplingOptions(), 60_000))
    tokens = []
    async for event in engine.events:
        if isinstance(event, TokenEmitted):
            tokens.append(event.token)
        if isinstance(event, SessionEnded):
            assert event.reason == "length", event
            break
    return tokens


def run(tmp_path: Path, expert_type: str, test: Any) -> None:
    path = make_qwen3moe(tmp_path / "source.gguf", SHAPE)
    if expert_type != "F32":
        path = quantise(path, tmp_path / "model.gguf", expert_type)

    async def main() -> None:
        model = ModelStore(tmp_path / "models").add(path)
        async with trio.open_nursery() as nursery:
            reference, _ = await start_reference(nursery, model, SETTINGS, tmp_path)
            tokens = random_tokens(POSITIONS, model.manifest.n_vocab, seed=5)
            await evaluate_logits(reference, tokens, CHUNKS, tmp_path / "single.npy")
            swarm = await start_local_swarm(nursery, model, SETTINGS, tmp_path, n_workers=1)
            case = Case(swarm, model, tmp_path, np.load(tmp_path / "single.npy"))
            await test(case, reference)
            for engine in (reference, swarm.backbone, *swarm.workers):
                await engine.close()

    trio.run(main)


@pytest.mark.parametrize("expert_type", ["F32", "Q4_K_M"])
def test_experts_of_its_own_give_the_bits_of_a_single_process(tmp_path: Path, expert_type: str) -> None:
    async def test(case: Case, reference: Any) -> None:
        worker_id = case.swarm.worker_ids[0]
        n_moe_layer = len(case.model.manifest.moe_layers)
        loaded = await case.hold(case.half, case.half)
        assert loaded.memory_bytes >= case.model.manifest.shard_size_bytes(case.half)
        assert loaded.shard_digest == case.half.digest()
        await case.require_exact("half")
        half_rows = await case.own_rows()
        assert 0 < half_rows < POSITIONS * n_moe_layer * SHAPE.n_expert_used
        assert (await case.statistics())["own_experts"] == len(case.half)

        # The same experts with another primary part are not read again: the file may as well be gone.
        hidden = case.model.source_path.rename(case.model.source_path.with_suffix(".hidden"))
        await case.hold(case.half, NOTHING)
        await case.require_exact("none asked first")
        assert await case.own_rows() == half_rows
        hidden.rename(case.model.source_path)

        await case.hold(case.everything, case.everything)
        await case.backbone.send(RemoveHolder(worker_id, "the backbone holds everything"))
        await case.require_exact("alone")
        all_rows = POSITIONS * n_moe_layer * SHAPE.n_expert_used
        assert await case.own_rows() - half_rows == all_rows
        statistics = await case.statistics()
        assert (statistics["missing_experts"], statistics["experts_missing_total"]) == (0, 0)
        assert statistics["own_experts"] == len(case.everything), "it was another that was removed"
        expected = await tokens_of(reference, case.tokens[:20])
        assert len(expected) == SESSION_TOKENS
        assert await tokens_of(case.backbone, case.tokens[:20]) == expected

        await case.backbone.send(RemoveHolder(case.swarm.backbone_id, "the plan gives it nothing"))
        with pytest.raises(NoHolderLeft):
            await case.logits("nobody")
        assert (await case.statistics())["own_experts"] == 0

    run(tmp_path, expert_type, test)


def test_experts_exchanged_under_a_running_decode_change_no_bit(tmp_path: Path) -> None:
    async def test(case: Case, _reference: Any) -> None:
        is_over = False
        rounds = 0

        async def exchange() -> None:
            nonlocal rounds
            while not is_over:
                for shard, primary in [
                    (case.half, case.half),
                    (case.half, NOTHING),
                    (case.everything, case.everything),
                    (case.everything, case.half),
                ]:
                    await case.hold(shard, primary)
                await case.backbone.send(RemoveHolder(case.swarm.backbone_id, "for a moment"))
                rounds += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange)
            for count in range(3):
                await case.require_exact(f"round {count}")
            is_over = True
        assert rounds > 0
        assert await case.own_rows() > 0
        assert (await case.statistics())["experts_missing_total"] == 0

    run(tmp_path, "Q4_K_M", test)


def test_a_load_that_fails_is_answered_and_changes_nothing(tmp_path: Path) -> None:
    async def test(case: Case, _reference: Any) -> None:
        await case.hold(case.half, case.half)
        foreign = ShardSet.from_ranges([(99, 0, 1)])
        for shard, primary in [(foreign, NOTHING), (case.half, case.everything)]:
            with pytest.raises(EngineFailed):
                await case.hold(shard, primary)
        hidden = case.model.source_path.rename(case.model.source_path.with_suffix(".hidden"))
        with pytest.raises(ModelUnusable):
            await case.hold(case.everything, NOTHING)
        hidden.rename(case.model.source_path)
        assert (await case.statistics())["own_experts"] == len(case.half)
        await case.require_exact("still half")

    run(tmp_path, "F32", test)
