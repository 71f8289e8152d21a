"""An interpolated, modified Kneser-Ney n-gram model: the baseline the demo model is held against.

Chen and Goodman, "An empirical study of smoothing techniques for language modeling" (1998): three
discounts an order, estimated from the counts of counts; raw counts at the highest order, and the
number of distinct left neighbours (continuation counts) below it. The lowest order is interpolated
with the uniform distribution, so every token has a probability. It knows only arrays of token ids;
numpy and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

DEMO_VOCABULARY = 4096
FALLBACK_DISCOUNTS = (0.5, 1.0, 1.5)


def estimate_discounts(counts: Integers) -> Floats:
    """The discounts of counts 0, 1, 2 and 3 or more; the first is 0.

    Where the formula gives no discount strictly between 0 and the count (a tiny corpus),
    `FALLBACK_DISCOUNTS` are used.
    """
    n1, n2, n3, n4 = (int(np.count_nonzero(counts == k)) for k in (1, 2, 3, 4))
    if 0 in (n1, n2, n3, n4):
        return np.array([0.0, *FALLBACK_DISCOUNTS])
    y = n1 / (n1 + 2 * n2)
    discounts = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    if np.any(discounts[1:] <= 0):
        return np.array([0.0, *FALLBACK_DISCOUNTS])
    return discounts


@dataclass(frozen=True)
class Order:
    """The n-grams of one length, each packed into one integer (base `n_vocab`, sorted).

    `share[i]` is the discounted probability of n-gram i given its history. For each history
    (n-gram without its last token) `backed_off` is the mass left to the next lower order.
    """

    ngrams: Integers
    share: Floats
    histories: Integers
    backed_off: Floats


def make_order(ngrams: Integers, counts: Integers, n_vocab: int) -> Order:
    """The discounted shares of sorted distinct n-grams and their counts."""
    discounts = estimate_discounts(counts)
    discount = discounts[np.minimum(counts, 3)]
    histories, first = np.unique(ngrams // n_vocab, return_index=True)
    total = np.add.reduceat(counts, first)
    sizes = np.diff(np.append(first, len(ngrams)))
    return Order(
        ngrams=ngrams,
        share=(counts - discount) / np.repeat(total, sizes),
        histories=histories,
        backed_off=np.add.reduceat(discount, first) / total,
    )


def look_up(table: Integers, values: Floats, wanted: Integers, missing: float) -> Floats:
    """`values` at the place of `wanted` in the sorted `table`, `missing` where it is not there."""
    index = np.minimum(np.searchsorted(table, wanted), len(table) - 1)
    return np.where(table[index] == wanted, values[index], missing)


class KneserNey:
    """An n-gram model of `len(orders)` orders, lowest first."""

    def __init__(self, orders: tuple[Order, ...], n_vocab: int) -> None:
        self.orders = orders
        self.n_vocab = n_vocab

    @classmethod
    def fit(cls, tokens: Integers, order: int, n_vocab: int) -> KneserNey:
        """The model of one token stream [n].

        Raises `ValueError` when the stream is shorter than `order`, has an id outside
        0..n_vocab-1, or when an n-gram would not fit 63 bits.
        """
        if len(tokens) < order or order < 1:
            raise ValueError("the stream must have at least `order` tokens, and order be at least 1")
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise ValueError("a token id is outside the vocabulary")
        if order * np.log2(n_vocab) > 62:
            raise ValueError("n-grams of this order do not fit one 64-bit integer")
        packed = np.zeros(len(tokens) - order + 1, dtype=np.int64)
        for offset in range(order):
            packed = packed * n_vocab + tokens[offset : len(tokens) - order + 1 + offset]
        ngrams, counts = np.unique(packed, return_counts=True)
        orders = [make_order(ngrams, counts, n_vocab)]
        for length in range(order - 1, 0, -1):
            # Of the distinct longer n-grams, how many end in each shorter one: its left neighbours.
            ngrams, counts = np.unique(ngrams % n_vocab**length, return_counts=True)
            orders.append(make_order(ngrams, counts, n_vocab))
        return cls(tuple(reversed(orders)), n_vocab)

    def probabilities(self, contexts: Integers, tokens: Integers) -> Floats:
        """P(tokens[i] | contexts[i]), [n]; contexts is [n, order - 1], the nearest token last."""
        probability = np.full(len(tokens), 1.0 / self.n_vocab)
        history = np.zeros(len(tokens), dtype=np.int64)
        scale = 1
        for length, order in enumerate(self.orders):
            if length:
                history = history + contexts[:, -length] * scale
                scale *= self.n_vocab
            share = look_up(order.ngrams, order.share, history * self.n_vocab + tokens, 0.0)
            backed_off = look_up(order.histories, order.backed_off, history, 1.0)
            probability = share + backed_off * probability
        return probability

    def stream_probabilities(self, tokens: Integers) -> Floats:
        """P of each token of a stream given those before it, from token `order - 1` on."""
        before = len(self.orders) - 1
        contexts = np.lib.stride_tricks.sliding_window_view(tokens, before + 1)[:, :before]
        return self.probabilities(contexts, tokens[before:])


def measure(train: Integers, held_out: Integers, size_bytes: int) -> dict[str, dict[str, float]]:
    """Perplexity and bits a byte of the orders 1 to 4, each on the same held-out tokens.

    `size_bytes` is the size of the held-out text. The first tokens, which have no full context at
    the highest order, are left out for every order.
    """
    highest = 4
    figures = {}
    for order in range(1, highest + 1):
        model = KneserNey.fit(train, order, DEMO_VOCABULARY)
        loss = -np.log(model.stream_probabilities(held_out[highest - order :]))
        bytes_a_token = size_bytes / len(held_out)
        figures[f"order_{order}"] = {
            "tokens": loss.size,
            "perplexity": round(math.exp(loss.mean()), 2),
            "bits_per_byte": round(loss.mean() / math.log(2) / bytes_a_token, 4),
        }
    return figures
