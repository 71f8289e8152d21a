"""What torch says of the trained weights: the figures llama.cpp is verified against.

Float32 throughout. Decides how the held-out text is cut for measuring: consecutive windows of the
trained context. Writes numbers and arrays only, so that verify.py needs no torch.
"""

from __future__ import annotations

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
from model import DemoModel, Shape
from numpy.typing import NDArray
from tokenizer import TokenArray
from tokenizers import Tokenizer

LOGIT_WINDOWS = 8
TRAIN_WINDOWS = 64
LINE_COUNT = 1_000

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
    losses, load = window_losses(model, held_out.ids)
    size_bytes = sum(document.size_bytes for document in documents) * losses.size / len(held_out.ids)

    length = model.shape.n_ctx_train
    begins = [i * (len(train.ids) - length - 1) // TRAIN_WINDOWS for i in range(TRAIN_WINDOWS)]
    sample = [window_losses(model, train.ids[begin : begin + length + 1])[0] for begin in begins]

    figures: dict[str, Any] = {
        "tokens": losses.size,
        "loss": round(losses.mean(), 5),
        "perplexity": round(math.exp(losses.mean()), 4),
        "bits_per_byte": round(losses.sum() / math.log(2) / size_bytes, 4),
        "perplexity_by_source": perplexity_by_source(losses, held_out, documents),
        "perplexity_of_training_text": round(math.exp(np.mean(sample)), 4),
        "expert_load_min": round(load.min(), 3),
        "expert_load_max": round(load.max(), 3),
    }
    (results / "reference.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))

    tokens = torch.from_numpy(held_out.ids.astype(np.int64))
    begins = [i * (len(tokens) - length - 1) // LOGIT_WINDOWS for i in range(LOGIT_WINDOWS)]
    windows = torch.stack([tokens[begin : begin + length] for begin in begins])
    with torch.no_grad():
        np.savez(work / "reference.npz", ids=windows.numpy(), logits=model.logits(windows).numpy())

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    lines = [line for document in documents for line in document.text.split("\n") if line.strip()]
    lines = [*random.Random(3).sample(lines, LINE_COUNT), *HOSTILE_STRINGS]
    ids = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
    (work / "tokenizer-check.json").write_text(json.dumps({"lines": lines, "ids": ids}))
