"""What torch says of the trained weights: the figures llama.cpp is verified against.

Float32 throughout. Decides how the held-out text is cut for measuring: consecutive windows of the
trained context. Writes numbers and arrays only, so that verify.py needs no torch.

Two correct programs may break a tie between a token's last chosen expert and the next one in two
ways, and everything after that token in its window then differs. So a window with ties has its
logits written for every way of breaking them.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from corpus import Document, read_split
from model import DemoModel, Shape, rms_norm, route
from numpy.typing import NDArray
from tokenizer import TokenArray
from tokenizers import Tokenizer
from torch import Tensor

LOGIT_WINDOWS = 8
TRAIN_WINDOWS = 64
LINE_COUNT = 1_000
# Loss is also given by place in the window: up to each of these, from the one before.
POSITION_BOUNDS = (32, 128, 256, 512)

# A decision is a tie when float32 rounding may turn it. Torch and llama.cpp differ by about 1e-4 in
# logits at the end and by some 1e-7 in a router's probabilities.
TIE_MARGIN = 1e-6
TIES_PER_WINDOW_MAX = 4

# Strings on which pre-tokenisers are known to disagree.
HOSTILE_STRINGS = (
    "   three spaces before", "trailing spaces   ", "a\t\ttab", "line\r\nfeed\r\n\r\n", "\n\n\n",
    "I'LL we'll they'Ve 'tis", "1234567890 3.14159 1,000,000",
    "e\u0301 \u00e9 na\u00efve \u00c5ngstr\u00f6m",  # accents, composed and not
    "\u05d1\u05e8\u05d0\u05e9\u05d9\u05ea \u05d1\u05e8\u05d0",  # Hebrew
    "\u521d\u3081\u306b\u8a00\u8449\u304c\u3042\u3063\u305f",  # Japanese
    "\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467",  # emoji with modifiers
    "no\u00a0break\u2003space", "nul\x00bell\x07", "x" * 300, "____....----!!!!????",
    "C:\\dir\\file.txt /etc/passwd", "<|endoftext", "a  b   c    d", " ", "",
)  # fmt: skip


class MarginRecorder:
    """Stands in for `route`, and keeps by how much each token's last chosen expert was chosen.

    `margins`: one [N] a call, the probability of the last chosen expert less that of the next one.
    """

    def __init__(self) -> None:
        self.margins: list[Tensor] = []

    def __call__(
        self, rows: Tensor, norm: Tensor, router: Tensor, shape: Shape, precision: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        logits = rms_norm(rows, norm, shape.rms_epsilon) @ router.t()
        best = torch.topk(torch.softmax(logits, -1), shape.n_expert_used + 1, -1).values
        self.margins.append(best[:, -2] - best[:, -1])
        return route(rows, norm, router, shape, precision)

    def by_layer(self, n_layer: int) -> NDArray[np.float64]:
        """All margins [n_layer, tokens], of passes through all layers."""
        passes = [torch.stack(self.margins[i : i + n_layer]) for i in range(0, len(self.margins), n_layer)]
        return torch.cat(passes, 1).double().numpy()

    def figures(self, n_layer: int) -> dict[str, float]:
        """Shares of decisions, and of tokens with such a decision in some layer, below a margin."""
        margins = self.by_layer(n_layer)
        return {
            "decisions_below_1e-3": round((margins < 1e-3).mean(), 5),
            "decisions_below_1e-4": round((margins < 1e-4).mean(), 5),
            "tokens_below_1e-4_in_some_layer": round((margins < 1e-4).any(0).mean(), 5),
        }


def route_to_next(
    rows: Tensor, norm: Tensor, router: Tensor, shape: Shape, precision: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`route`, with the next best expert in the place of the last one chosen, at its own probability."""
    normed, mean, _, _, z = route(rows, norm, router, shape, precision)
    probability = torch.softmax(rms_norm(rows, norm, shape.rms_epsilon) @ router.t(), -1)
    best, experts = torch.topk(probability, shape.n_expert_used + 1, -1)
    kept = [*range(shape.n_expert_used - 1), shape.n_expert_used]
    chosen = best[:, kept]
    return normed, mean, chosen / chosen.sum(-1, keepdim=True), experts[:, kept].contiguous(), z


class TieBreaker:
    """Stands in for `route` in one pass over one window: `decisions`, (layer, position), go the other way."""

    def __init__(self, decisions: Sequence[tuple[int, int]]) -> None:
        self.decisions = decisions
        self.layer = 0

    def __call__(
        self, rows: Tensor, norm: Tensor, router: Tensor, shape: Shape, precision: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        normed, mean, weights, experts, z = route(rows, norm, router, shape, precision)
        _, _, next_weights, next_experts, _ = route_to_next(rows, norm, router, shape, precision)
        for layer, position in self.decisions:
            if layer == self.layer:
                weights[position], experts[position] = next_weights[position], next_experts[position]
        self.layer += 1
        return normed, mean, weights, experts, z


def logits_by_ties(model: DemoModel, window: Tensor) -> list[NDArray[np.float32]]:
    """Logits [T, n_vocab] of a window [T] for every way of breaking its ties; torch's own way first."""
    recorder = MarginRecorder()
    with torch.no_grad():
        model.route = recorder
        model.logits(window[None])
        ties = np.argwhere(recorder.by_layer(model.shape.n_layer) < TIE_MARGIN).tolist()
        if len(ties) > TIES_PER_WINDOW_MAX:
            raise ValueError(f"{len(ties)} ties in one window, at most {TIES_PER_WINDOW_MAX} expected")
        found = []
        for size in range(len(ties) + 1):
            for decisions in itertools.combinations(ties, size):
                model.route = TieBreaker(decisions)
                found.append(model.logits(window[None])[0].numpy())
    model.route = route
    return found


def window_losses(
    model: DemoModel, ids: NDArray[np.uint16]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(loss in nats of each target [windows, T], expert load [n_layer, E]) over all whole windows.

    Window w predicts tokens w*T+1 .. (w+1)*T from tokens w*T on.
    """
    length = model.shape.n_ctx_train
    tokens = torch.from_numpy(ids.astype(np.int64))
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    losses, loads = [], []
    with torch.no_grad():
        for first in range(0, count, 8):
            part = slice(first, first + 8)
            rows, statistics = model.hidden(inputs[part], torch.float32)
            logits = rows @ model.embedding.t()
            loss = functional.cross_entropy(logits, targets[part].reshape(-1), reduction="none")
            losses.append(loss.view(-1, length))
            loads.append(statistics.load * len(inputs[part]))
    return torch.cat(losses).double().numpy(), (torch.stack(loads).sum(0) / count).double().numpy()


def perplexity_by_source(
    losses: NDArray[np.float64], held_out: TokenArray, documents: Sequence[Document]
) -> dict[str, float]:
    """Perplexity of the targets that lie in each source's documents."""
    document_of = np.searchsorted(held_out.starts, np.arange(1, losses.size + 1), side="right") - 1
    source_of = np.array([document.source for document in documents])[document_of]
    return {
        str(source): round(math.exp(losses.reshape(-1)[source_of == source].mean()), 3)
        for source in np.unique(source_of)
    }


def measure(work: Path, results: Path) -> None:
    """Writes reference.npz and tokenizer-check.json to `work`, and reference.json to `results`."""
    model = DemoModel(Shape())
    model.load_state_dict(torch.load(work / "weights.pt"))
    documents = read_split(work / "corpus.json").held_out
    held_out, train = TokenArray.load(work / "held_out.npz"), TokenArray.load(work / "train.npz")
    recorder = MarginRecorder()
    model.route = recorder
    losses, load = window_losses(model, held_out.ids)
    model.route = route_to_next
    losses_of_next, _ = window_losses(model, held_out.ids)
    model.route = route
    size_bytes = sum(document.size_bytes for document in documents) * losses.size / len(held_out.ids)

    length = model.shape.n_ctx_train
    begins = [i * (len(train.ids) - length - 1) // TRAIN_WINDOWS for i in range(TRAIN_WINDOWS)]
    sample = [window_losses(model, train.ids[begin : begin + length + 1])[0] for begin in begins]

    bounds = list(zip((0, *POSITION_BOUNDS), POSITION_BOUNDS, strict=False))
    figures: dict[str, Any] = {
        "tokens": losses.size,
        "loss": round(losses.mean(), 5),
        "perplexity": round(math.exp(losses.mean()), 4),
        "bits_per_byte": round(losses.sum() / math.log(2) / size_bytes, 4),
        "perplexity_by_source": perplexity_by_source(losses, held_out, documents),
        "perplexity_of_training_text": round(math.exp(np.mean(sample)), 4),
        "expert_load_min": round(load.min(), 3),
        "expert_load_max": round(load.max(), 3),
        "router_margins": recorder.figures(model.shape.n_layer),
        "perplexity_with_the_next_expert_for_the_last": round(math.exp(losses_of_next.mean()), 4),
        "loss_by_position": {
            f"{begin}-{end - 1}": round(losses[:, begin:end].mean(), 4) for begin, end in bounds
        },
    }
    (results / "reference.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))

    tokens = torch.from_numpy(held_out.ids.astype(np.int64))
    begins = [i * (len(tokens) - length - 1) // LOGIT_WINDOWS for i in range(LOGIT_WINDOWS)]
    windows = torch.stack([tokens[begin : begin + length] for begin in begins])
    ways = [logits_by_ties(model, window) for window in windows]
    np.savez(
        work / "reference.npz", ids=windows.numpy(), logits=np.stack([each for way in ways for each in way]),
        window_of=np.repeat(np.arange(len(ways)), [len(way) for way in ways]),
    )  # fmt: skip

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    lines = [line for document in documents for line in document.text.split("\n") if line.strip()]
    lines = [*random.Random(3).sample(lines, LINE_COUNT), *HOSTILE_STRINGS]
    ids = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
    (work / "tokenizer-check.json").write_text(json.dumps({"lines": lines, "ids": ids}))
