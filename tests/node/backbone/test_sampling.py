"""Draws depend on (seed, position) only, and tokens on the draw and the distribution only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.backbone.sampling import Sampler, draw_token, log_probabilities, uniform_draw
from kvasir_proto.errors import EngineFailed
from kvasir_proto.limits import LOG_PROBABILITY_MIN
from kvasir_proto.sampling import Sampling, SamplingOptions

PLAIN = Sampling(seed=7, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
N_VOCAB = 50


def logits_of(seed: int, n: int = N_VOCAB) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return (3 * np.random.default_rng(seed).normal(size=n)).astype(np.float32)


def sample(parameters: Sampling, seed: int, position: int) -> int:
    logits = logits_of(seed)
    sampler = Sampler(parameters, len(logits))
    try:
        return sampler.sample(logits, position)
    finally:
        sampler.close()


# ---- The draw ----


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**18))
def test_a_draw_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    draw = uniform_draw(seed, position)
    assert 0.0 <= draw < 1.0
    assert draw == int(draw * 2**53) / 2**53
    uniform_draw(seed ^ 1, position + 5)
    np.random.random(3)  # numpy's global state has no part in it
    assert uniform_draw(seed, position) == draw


def test_draws_are_the_ones_they_always_were() -> None:
    """A continuation on another machine, of another version, draws these numbers."""
    cases = ((0, 0), (0, 1), (1, 0), (2**64 - 1, 262_144))
    drawn = [uniform_draw(seed, position) for seed, position in cases]
    assert drawn == [float.fromhex(each) for each in GOLDEN_DRAWS]


GOLDEN_DRAWS = (
    "0x1.7a5d3204726c0p-7",
    "0x1.0137e64510730p-1",
    "0x1.36da89edd58a0p-2",
    "0x1.c158422e620adp-1",
)


def test_draws_of_different_positions_and_seeds_look_independent() -> None:
    draws = np.array([[uniform_draw(seed, position) for position in range(200)] for seed in range(10)])
    assert len(set(draws.reshape(-1))) == draws.size
    assert abs(draws.mean() - 0.5) < 0.02
    counts, _ = np.histogram(draws, 10, (0, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 30  # chi-square, 9 degrees of freedom
    assert abs(np.corrcoef(draws[:, :-1].reshape(-1), draws[:, 1:].reshape(-1))[0, 1]) < 0.08


# ---- The token ----


def brute_force(ids: list[int], logits: list[float], uniform: float) -> int:
    """Walk through the candidates by id until the draw is used up."""
    weights = {i: float(np.exp(np.float64(x) - max(logits))) for i, x in zip(ids, logits, strict=True)}
    rest = uniform * sum(weights[i] for i in sorted(ids))
    for i in sorted(ids):
        rest -= weights[i]
        if rest < 0:
            return i
    return max(ids)


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=12),
    uniform=st.floats(0, 1, exclude_max=True),
    data=st.data(),
)
def test_a_token_is_the_inverse_of_the_cumulative_distribution(
    logits: list[float], uniform: float, data: st.DataObject
) -> None:
    ids = data.draw(st.permutations(range(0, 7 * len(logits), 7)))
    token = draw_token(np.array(ids, np.int32), np.array(logits, np.float32), uniform)
    expected = brute_force(ids, logits, uniform)
    if token != expected:  # the two add in another order: only a draw on the very border may differ
        low, high = sorted((token, expected))
        assert abs(sorted(ids).index(low) - sorted(ids).index(high)) == 1
        weights = np.exp(np.array(logits, np.float64) - max(logits))
        border = sum(w for i, w in zip(ids, weights, strict=True) if i <= low) / weights.sum()
        assert abs(border - uniform) < 1e-12


@given(seed=st.integers(0, 1000), uniform=st.floats(0, 1, exclude_max=True))
def test_the_order_of_candidates_does_not_matter(seed: int, uniform: float) -> None:
    logits = logits_of(seed, 20)
    ids = np.arange(20, dtype=np.int32)
    shuffled = np.random.default_rng(seed + 1).permutation(20)
    assert draw_token(ids, logits, uniform) == draw_token(ids[shuffled], logits[shuffled], uniform)


def test_candidates_without_weight_are_never_drawn() -> None:
    ids = np.arange(4, dtype=np.int32)
    logits = np.array([-np.inf, 0.0, -1e4, 0.0], np.float32)
    drawn = {draw_token(ids, logits, uniform) for uniform in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53)}
    assert drawn == {1, 3}


def test_frequencies_follow_the_distribution() -> None:
    logits = np.log(np.array([1, 2, 3, 4], np.float32))
    ids = np.arange(4, dtype=np.int32)
    tokens = [draw_token(ids, logits, uniform_draw(3, position)) for position in range(4000)]
    assert np.abs(np.bincount(tokens) / 4000 - np.array([0.1, 0.2, 0.3, 0.4])).max() < 0.025


# ---- The sampler ----


def test_greedy_takes_the_highest_and_of_equals_the_lowest_id() -> None:
    greedy = Sampling(temperature=0.0)
    sampler = Sampler(greedy, 4)
    assert sampler.sample(np.array([0.0, 2.0, 2.0, 1.0], np.float32), 0) == 1
    sampler.close()


def test_a_sample_depends_on_position_and_not_on_what_was_sampled_before() -> None:
    sampler = Sampler(PLAIN, N_VOCAB)
    tokens = [sampler.sample(logits_of(position), position) for position in range(30)]
    backwards = [sampler.sample(logits_of(position), position) for position in reversed(range(30))]
    sampler.close()
    assert tokens == backwards[::-1]
    assert tokens == [sample(PLAIN, position, position) for position in range(30)]
    assert len({sample(PLAIN, 0, position) for position in range(60)}) > 3


def test_without_filters_a_sample_is_the_draw_on_the_whole_distribution() -> None:
    ids = np.arange(N_VOCAB, dtype=np.int32)
    for position in range(30):
        expected = draw_token(ids, logits_of(position), uniform_draw(7, position))
        assert sample(PLAIN, position, position) == expected


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_top_k_keeps_the_k_highest(top_k: int) -> None:
    parameters = Sampling(seed=7, temperature=2.0, top_k=top_k, top_p=1.0, min_p=0.0)
    highest = set(np.argsort(logits_of(5))[-top_k:].tolist())
    drawn = {sample(parameters, 5, position) for position in range(200)}
    assert drawn <= highest
    assert len(drawn) >= min(top_k, 3)


def test_top_p_and_min_p_cut_the_tail() -> None:
    logits = logits_of(5).astype(np.float64)
    weights = np.exp(logits - logits.max())
    order = np.argsort(-weights)
    mass = np.cumsum(weights[order]) / weights.sum()
    nucleus = set(order[: int(np.searchsorted(mass, 0.7)) + 1].tolist())
    parameters = Sampling(seed=1, temperature=1.0, top_k=0, top_p=0.7, min_p=0.0)
    assert {sample(parameters, 5, position) for position in range(200)} == nucleus
    likely = set(np.flatnonzero(weights >= 0.2).tolist())
    parameters = Sampling(seed=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.2)
    assert {sample(parameters, 5, position) for position in range(200)} == likely


def test_a_low_temperature_is_nearly_greedy() -> None:
    parameters = Sampling(seed=1, temperature=0.01)
    assert {sample(parameters, 5, position) for position in range(50)} == {int(np.argmax(logits_of(5)))}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_distribution_are_an_error(temperature: float, bad: float) -> None:
    logits = logits_of(1)
    logits[3] = bad
    sampler = Sampler(Sampling(temperature=temperature), N_VOCAB)
    with pytest.raises(EngineFailed, match="position 12"):
        sampler.sample(logits, 12)
    logits[3] = -np.inf  # a token that is ruled out is no reason to stop
    assert 0 <= sampler.sample(logits, 12) < N_VOCAB
    sampler.close()
    sampler.close()


# ---- Biases, penalties, log-probabilities ----

GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize(
    "options, tokens",
    [
        (SamplingOptions(GREEDY), [3, 3, 3, 3]),
        (SamplingOptions(GREEDY, logit_bias=((1, 2.5), (9, 99.0))), [1, 1, 1, 1]),
        (SamplingOptions(GREEDY, logit_bias=((2, 0.5), (3, -100.0))), [2, 2, 2, 2]),
        (SamplingOptions(GREEDY, presence_penalty=1.5), [3, 2, 3, 3]),
        (SamplingOptions(GREEDY, frequency_penalty=0.75), [3, 3, 2, 3]),
        (SamplingOptions(GREEDY, presence_penalty=-1.0), [3, 3, 3, 3]),
    ],
)
def test_biases_and_penalties_change_what_is_drawn(options: SamplingOptions, tokens: list[int]) -> None:
    logits = np.array([0.0, 1.0, 2.0, 3.0], np.float32)
    sampler = Sampler(options, 4)
    assert [sampler.sample(logits, position) for position in range(4)] == tokens
    assert logits.tolist() == [0.0, 1.0, 2.0, 3.0], "they are the model's own"
    continued = Sampler(options, 4, tokens[:2])
    assert [continued.sample(logits, position) for position in range(2, 4)] == tokens[2:]


def test_a_draw_among_many_is_biased_as_well() -> None:
    options = SamplingOptions(PLAIN, logit_bias=((7, 100.0),))
    assert Sampler(options, N_VOCAB).sample(logits_of(1), 5) == 7


@given(seed=st.integers(0, 1000), n_top=st.integers(0, N_VOCAB + 3))
def test_log_probabilities_are_those_of_the_softmax(seed: int, n_top: int) -> None:
    logits = np.round(logits_of(seed))  # with many that are equal
    exact = np.log(np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum())
    own, top = log_probabilities(logits, 4, n_top)
    assert own == pytest.approx(exact[4])
    order = sorted(range(N_VOCAB), key=lambda each: (-exact[each], each))[:n_top]
    assert [token for token, _ in top] == order
    assert [value for _, value in top] == pytest.approx(exact[order].tolist())


def test_what_is_ruled_out_has_a_log_probability_that_can_be_told() -> None:
    logits = np.array([0.0, -np.inf, 1.0], np.float32)
    own, top = log_probabilities(logits, 1, 3)
    assert own == top[2][1] == LOG_PROBABILITY_MIN
    assert log_probabilities(np.array([1.0], np.float32), 0, 1) == (0.0, ((0, 0.0),))
