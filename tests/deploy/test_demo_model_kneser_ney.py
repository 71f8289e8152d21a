"""The baseline of deploy/demo-model: a Kneser-Ney model must be a probability distribution."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.deploy.demo_model_scripts import load_script

kneser_ney = load_script("kneser_ney")
N_VOCAB = 23


def stream(size: int) -> NDArray[np.int64]:
    """Token ids with a skewed, context-dependent distribution."""
    random = np.random.default_rng(5)
    tokens = [0]
    for draw in random.zipf(1.6, size - 1):
        tokens.append((tokens[-1] * 3 + int(draw)) % N_VOCAB)
    return np.array(tokens, dtype=np.int64)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [40, 5_000])
def test_sums_to_one_in_every_context(order: int, size: int) -> None:
    model = kneser_ney.KneserNey.fit(stream(size), order, N_VOCAB)
    contexts = np.random.default_rng(6).integers(0, N_VOCAB, (50, order - 1))
    for context in contexts:  # seen and unseen histories
        probabilities = model.probabilities(np.tile(context, (N_VOCAB, 1)), np.arange(N_VOCAB))
        assert np.all(probabilities > 0)
        assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)


def test_agrees_with_the_formula_written_out() -> None:
    """Bigram, by hand: discounted count, plus the left-over mass times the continuation share."""
    tokens = np.array([0, 1, 0, 2, 0, 1, 3, 1], dtype=np.int64)
    model = kneser_ney.KneserNey.fit(tokens, 2, 4)
    d1, d2, _ = kneser_ney.FALLBACK_DISCOUNTS
    # Histories: 0 -> 1 twice, 2 once. Distinct bigrams 01 10 02 20 13 31: token 1 ends two of six.
    d = [d2 if count == 2 else d1 for count in (2, 2, 1, 1)]  # continuation counts of 0 1 2 3
    unigram = [(c - x) / 6 + sum(d) / 6 / 4 for c, x in zip((2, 2, 1, 1), d, strict=True)]
    expected = (2 - d2) / 3 + (d2 + d1) / 3 * unigram[1]
    assert model.probabilities(np.array([[0]]), np.array([1]))[0] == pytest.approx(expected)


def test_a_longer_context_helps_where_the_stream_has_one() -> None:
    tokens = stream(20_000)
    train, held_out = tokens[:16_000], tokens[16_000:]
    losses = [
        -np.log(kneser_ney.KneserNey.fit(train, order, N_VOCAB).stream_probabilities(held_out)).mean()
        for order in (1, 2)
    ]
    assert losses[1] < losses[0] - 0.1


@pytest.mark.parametrize(
    "tokens, order, n_vocab, complaint",
    [
        ([1], 2, 4, "at least `order` tokens"),
        ([0, 4], 1, 4, "outside the vocabulary"),
        ([-1, 1], 1, 4, "outside the vocabulary"),
        ([0, 1, 2, 3, 4, 5], 6, 4096, "do not fit"),
    ],
)
def test_refuses_what_it_cannot_pack(tokens: list[int], order: int, n_vocab: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        kneser_ney.KneserNey.fit(np.array(tokens), order, n_vocab)
