"""Does llama.cpp, reading the GGUF files, do what torch did with the weights?

Compares logits, perplexity and tokenisation, and takes samples. Runs where llama-cpp-python is
installed and torch is not. On a Mixture of Experts the greatest logit difference is a poor gate
once anything is rounded: a token whose fourth and fifth expert are nearly tied may take the other
one. So only the float32 file with a float32 KV cache is gated on it, and there a tie below float32's
rounding may be broken either way, all else being equal. The shipped file is judged by
Kullback-Leibler divergence, top-1 agreement and perplexity.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

N_CTX = 512
SIZE_BYTES_MAX = 24_000_000
PROMPTS = (
    "In the beginning", "The LORD said unto Moses,", "Emma was", "It is a truth", "hack value: n.",
    "MARRIAGE, n.", '"My dear Mr. Bennet," said', "We may learn from this",
)  # fmt: skip

# What must hold; the figures of two runs leave each a wide margin.
F32_LOGIT_DELTA_MAX = 1e-3
Q8_0_MEAN_KL_MAX = 3e-3
Q8_0_TOP1_MIN = 0.97
Q8_0_PERPLEXITY_RATIO_MAX = 1.005


class VerificationFailed(Exception):
    """The exported file does not do what the trained weights do."""


def open_model(path: Path, kv_f32: bool, threads: int, every_logit: bool = True) -> llama_cpp.Llama:
    kv_type = llama_cpp.GGML_TYPE_F32 if kv_f32 else llama_cpp.GGML_TYPE_F16
    return llama_cpp.Llama(
        str(path), n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=N_CTX, logits_all=every_logit, verbose=False,
        n_threads=threads, n_threads_batch=threads, type_k=kv_type, type_v=kv_type,
    )  # fmt: skip


def logits_of(model: llama_cpp.Llama, ids: NDArray[Any]) -> NDArray[np.float64]:
    """Logits [len(ids), n_vocab] of one window from an empty context."""
    model.reset()
    model.eval(ids.tolist())
    return np.array(model.scores[: len(ids)], dtype=np.float64)


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True)
class TorchLogits:
    """Windows [W, T], and torch's logits of each, a list of [T, n_vocab]: one for every way of
    breaking the ties between experts, torch's own way first."""

    windows: NDArray[Any]
    logits: list[list[NDArray[Any]]]

    @classmethod
    def load(cls, path: Path) -> TorchLogits:
        with np.load(path) as stored:
            windows, logits, window_of = stored["ids"], stored["logits"], stored["window_of"]
        return cls(windows, [list(logits[window_of == index]) for index in range(len(windows))])

    @property
    def n_ties(self) -> int:
        return sum(len(ways).bit_length() - 1 for ways in self.logits)

    def own_way(self) -> list[NDArray[Any]]:
        return [ways[0] for ways in self.logits]

    def nearest(self, ours: list[NDArray[np.float64]]) -> list[NDArray[Any]]:
        """Of each window the way whose greatest difference from our logits is least."""

        def pick(logits: NDArray[np.float64], ways: list[NDArray[Any]]) -> NDArray[Any]:
            return min(ways, key=lambda way: float(np.abs(logits - way).max()))

        return [pick(logits, ways) for logits, ways in zip(ours, self.logits, strict=True)]


def compare_logits(ours: list[NDArray[np.float64]], expected: list[NDArray[Any]]) -> dict[str, float]:
    """llama.cpp's logits against torch's, over every position of the reference windows."""
    deltas, same, divergence = [], [], []
    for logits, torch_logits in zip(ours, expected, strict=True):
        deltas.append(np.abs(logits - torch_logits).max(-1))
        same.append(logits.argmax(-1) == torch_logits.argmax(-1))
        log_p, log_q = log_softmax(torch_logits.astype(np.float64)), log_softmax(logits)
        divergence.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
    delta = np.concatenate(deltas)
    return {
        "positions": delta.size,
        "max_abs_delta": float(f"{delta.max():.3g}"),
        "median_abs_delta": float(f"{np.median(delta):.3g}"),
        "top1_agreement": round(float(np.concatenate(same).mean()), 5),
        "mean_kl": float(f"{np.concatenate(divergence).mean():.3g}"),
    }


def perplexity(model: llama_cpp.Llama, ids: NDArray[Any]) -> float:
    """Perplexity of all whole windows of the held-out tokens, cut as reference.py cuts them."""
    total, count = 0.0, (len(ids) - 1) // N_CTX
    for first in range(0, count * N_CTX, N_CTX):
        log_probability = log_softmax(logits_of(model, ids[first : first + N_CTX]))
        targets = ids[first + 1 : first + N_CTX + 1].astype(np.int64)
        total -= log_probability[np.arange(N_CTX), targets].sum()
    return math.exp(total / (count * N_CTX))


def compare_tokenizer(model: llama_cpp.Llama, check_path: Path) -> dict[str, int]:
    """How many strings llama.cpp tokenises differently, or does not give back byte for byte."""
    check = json.loads(check_path.read_text(encoding="utf-8"))
    different = 0
    for line, ids in zip(check["lines"], check["ids"], strict=True):
        ours = model.tokenize(line.encode(), add_bos=False, special=False)
        different += ours != ids or model.detokenize(ours) != line.encode()
    return {"strings": len(check["lines"]), "different": different}


def take_samples(model: llama_cpp.Llama) -> list[dict[str, str | float]]:
    """One greedy and one drawn continuation of each prompt; the first try, whatever it is."""
    samples: list[dict[str, str | float]] = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.8):
            reply = model(
                prompt, max_tokens=90, seed=7, repeat_penalty=1.0,
                temperature=temperature, top_p=0.95, top_k=40,
            )  # fmt: skip
            text = reply["choices"][0]["text"]
            samples.append({"prompt": prompt, "temperature": temperature, "text": text})
    return samples


def verify(work: Path, results: Path, threads: int) -> dict[str, Any]:
    """Writes results/verify.json; raises `VerificationFailed` naming what did not hold."""
    f32_path, shipped_path = work / "demo-f32.gguf", work / "demo-q8_0.gguf"
    reference = json.loads((results / "reference.json").read_text())
    with np.load(work / "held_out.npz") as stored:
        held_out = stored["ids"]
    torch_logits = TorchLogits.load(work / "reference.npz")
    exact = open_model(f32_path, kv_f32=True, threads=threads)
    exact_logits = [logits_of(exact, ids) for ids in torch_logits.windows]
    shipped = open_model(shipped_path, kv_f32=False, threads=threads)
    shipped_logits = [logits_of(shipped, ids) for ids in torch_logits.windows]
    document: dict[str, Any] = {
        "sha256": hashlib.sha256(shipped_path.read_bytes()).hexdigest(),
        "size_bytes": shipped_path.stat().st_size,
        "llama_cpp_python": llama_cpp.__version__,
        "ties": torch_logits.n_ties,
        "f32_file_f32_kv_cache": compare_logits(exact_logits, torch_logits.own_way()),
        "f32_file_f32_kv_cache_ties_either_way": compare_logits(
            exact_logits, torch_logits.nearest(exact_logits)
        ),
        "q8_0_file_f16_kv_cache": compare_logits(shipped_logits, torch_logits.own_way()),
        "perplexity_torch_f32": reference["perplexity"],
        "perplexity_q8_0": round(perplexity(shipped, held_out), 4),
        "tokenizer": compare_tokenizer(shipped, work / "tokenizer-check.json"),
        "samples": take_samples(open_model(shipped_path, kv_f32=False, threads=threads, every_logit=False)),
    }
    (results / "verify.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    failed = [name for name, held in gates(document).items() if not held]
    if failed:
        raise VerificationFailed(f"did not hold: {', '.join(failed)}; see {results / 'verify.json'}")
    return document


def gates(document: dict[str, Any]) -> dict[str, bool]:
    """Each condition by name, and whether it holds."""
    exact, shipped = document["f32_file_f32_kv_cache_ties_either_way"], document["q8_0_file_f16_kv_cache"]
    ratio = document["perplexity_q8_0"] / document["perplexity_torch_f32"]
    return {
        "the file is small enough to ship": document["size_bytes"] <= SIZE_BYTES_MAX,
        "float32 logits agree": exact["max_abs_delta"] <= F32_LOGIT_DELTA_MAX,
        "Q8_0 divergence is small": shipped["mean_kl"] <= Q8_0_MEAN_KL_MAX,
        "Q8_0 agrees on the first choice": shipped["top1_agreement"] >= Q8_0_TOP1_MIN,
        "Q8_0 costs little perplexity": ratio <= Q8_0_PERPLEXITY_RATIO_MAX,
        "the tokenisers agree": document["tokenizer"]["different"] == 0,
    }
