"""Sessions on every kind of memory that llama.cpp keeps of a sequence: recurrent states, windows, latents.

Alone in a context with several sequences a session gives the tokens of a context of its own; together with
others it is at least answered, and here, where margins are wide, with the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvasir_node.backbone.sampling import Sampler
from kvasir_node.backbone.sessions import SessionContext, Sessions, WantedSession
from kvasir_node.backbone.trunk import Trunk, TrunkSettings
from kvasir_proto.sampling import Sampling
from kvasir_proto.sessions.options import SessionOptions
from kvasir_proto.sessions.requests import Open
from tests.architecture_models import ARCHITECTURES, ArchitectureModel, make_architecture
from tests.node.backbone.test_sessions import Heard, named
from tests.proto.sessions.toy_backbone import LATE

GREEDY = Sampling(temperature=0.0)
N_TOKENS = 8
SETTINGS = TrunkSettings(n_ctx=256, n_ubatch=16, n_threads=1, kv_type="f32")
NAMES = (
    "qwen3moe-swiglu",
    "bailingmoe3-swiglu-clamped",
    "deepseek4-swiglu-clamp",
    "granitehybrid-swiglu",
    "jamba-swiglu",
    "kimi-linear-swiglu",
    "lfm2moe-swiglu",
    "minimax-01-swiglu",
    "smallthinker-reglu",
    "step35-swiglu-clamped",
)
MODELS = tuple(each for each in ARCHITECTURES if each.name in NAMES)


def by_itself(trunk: Trunk, prompt: Sequence[int]) -> list[int]:
    """What follows a prompt in a context with one sequence."""
    trunk.clear()
    sampler, tokens = Sampler(GREEDY, trunk.n_vocab), list[int]()
    for start in range(0, len(prompt), SETTINGS.n_ubatch):
        trunk.decode(prompt[start : start + SETTINGS.n_ubatch])
    while len(tokens) < N_TOKENS:
        tokens.append(sampler.sample(trunk.logits(), trunk.position))
        if trunk.is_end_of_generation(tokens[-1]):
            return tokens[:-1]
        trunk.decode(tokens[-1:])
    return tokens


def test_the_models_are_all_there() -> None:
    assert len(MODELS) == len(NAMES)


@pytest.mark.parametrize("model", MODELS, ids=lambda each: each.name)
def test_sessions_give_what_a_context_of_their_own_gives(model: ArchitectureModel, tmp_path: Path) -> None:
    trunk = Trunk(make_architecture(tmp_path / "model.gguf", model), SETTINGS, None)
    draws = np.random.default_rng(1)
    prompts = [draws.integers(1, trunk.n_vocab, size).tolist() for size in (3, 20, 37, 9)]
    expected = [by_itself(trunk, prompt) for prompt in prompts]
    context = trunk.beside(SETTINGS.n_ctx, SETTINGS.n_ubatch, n_sequences=4)
    options = SessionOptions(
        n_cells=SETTINGS.n_ctx, n_ubatch=SETTINGS.n_ubatch, sessions_per_context=4, prefill_chunk=4
    )
    heard = Heard()
    sessions = Sessions([SessionContext(context)], options, heard, check_authority=lambda: (1, 1))
    try:
        for first, is_alone in ((0, True), (10, False)):
            for index, prompt in enumerate(prompts):
                opened = Open(named(first + index), "one", tuple(prompt), N_TOKENS, frozenset(), LATE)
                sessions.open(WantedSession(opened, GREEDY))
                if is_alone:
                    heard.wait(first + index)
            heard.wait(*range(first, first + 4))
    finally:
        sessions.close()
        context.close()
        trunk.close()
    assert [heard.ids(index) for index in range(4)] == expected
    assert [heard.ids(10 + index) for index in range(4)] == expected
