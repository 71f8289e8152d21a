"""Sampling: which token a session emits, decided once, on its backbone.

llama.cpp's filters (top-k, top-p, min-p, temperature) shape the distribution; the random draw is ours. It is
counter-based (Philox, Salmon et al. 2011): a pure function of (seed, position), with no state to carry, so a
continuation on another backbone draws the same numbers. Biases and penalties change the logits before; the
log-probabilities that are told are those of the model. The module refuses to know sessions and contexts.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvasir_proto.errors import EngineFailed
from kvasir_proto.limits import LOG_PROBABILITY_MIN
from kvasir_proto.sampling import Sampling, SamplingOptions


def uniform_draw(seed: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits that depends on (seed, position) only."""
    generator = np.random.Philox(key=seed & (2**128 - 1), counter=position)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53


def draw_token(token_ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32], uniform: float) -> int:
    """Invert the cumulative distribution of ``softmax(logits)`` at ``uniform``.

    Candidates are taken in the order of their token ids and added in float64, so that the result does not
    depend on the order in which a filter left them. Both arrays have shape [n_candidates], n_candidates > 0.
    """
    order = np.argsort(token_ids, kind="stable")
    ids = token_ids[order]
    scaled = logits[order].astype(np.float64)
    cumulative = np.cumsum(np.exp(scaled - scaled.max()))
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def log_probabilities(
    logits: npt.NDArray[np.float32], token: int, n_top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The natural log-probability of ``token``, and the ``n_top`` likeliest tokens with theirs.

    Of logits of shape [n_vocab]; the likeliest first, of equals the lowest id. Added up in float64. What is
    ruled out has the lowest that can be told.
    """
    values = logits.astype(np.float64)
    highest = values.max()
    norm = highest + np.log(np.exp(values - highest).sum())
    top: list[int] = []
    if n_top > 0:
        n_top = min(n_top, len(values))
        # All that are as likely as the last of them, or which of equals is told would be chance.
        least = np.partition(values, len(values) - n_top)[len(values) - n_top]
        candidates = np.flatnonzero(values >= least)
        top = candidates[np.argsort(-values[candidates], kind="stable")][:n_top].tolist()

    def told(each: int) -> float:
        return float(np.clip(values[each] - norm, LOG_PROBABILITY_MIN, 0.0))

    return told(token), tuple((each, told(each)) for each in top)


class Sampler:
    """One session's sampler over logits of shape [n_vocab]; freed with its last reference."""

    def __init__(
        self, options: Sampling | SamplingOptions, n_vocab: int, generated: Iterable[int] = ()
    ) -> None:
        """``generated``: tokens that the session has emitted already, which penalties count."""
        if isinstance(options, Sampling):
            options = SamplingOptions(options)
        parameters = options.draw
        self._parameters = parameters
        self._presence, self._frequency = options.presence_penalty, options.frequency_penalty
        within = [(token, bias) for token, bias in options.logit_bias if token < n_vocab]
        self._biased = np.array([token for token, _ in within], np.int64)
        self._biases = np.array([bias for _, bias in within], np.float32)
        self._counts: dict[int, int] = {}
        for token in generated:
            self._note(token)
        self._candidates = (llama_cpp.llama_token_data * n_vocab)()
        self._view = np.ctypeslib.as_array(self._candidates)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        add = llama_cpp.llama_sampler_chain_add
        if parameters.top_k > 0:
            add(self._chain, llama_cpp.llama_sampler_init_top_k(parameters.top_k))
        if parameters.top_p < 1.0:
            add(self._chain, llama_cpp.llama_sampler_init_top_p(parameters.top_p, 1))
        if parameters.min_p > 0.0:
            add(self._chain, llama_cpp.llama_sampler_init_min_p(parameters.min_p, 1))
        if parameters.temperature > 0.0:
            add(self._chain, llama_cpp.llama_sampler_init_temp(parameters.temperature))
        self._free = weakref.finalize(self, llama_cpp.llama_sampler_free, self._chain)

    def sample(self, logits: npt.NDArray[np.float32], position: int) -> int:
        """The token for ``position``, given its logits of shape [n_vocab]. Lowest id wins a greedy tie.

        Raises `EngineFailed` for logits that make no distribution: a NaN would win every comparison.
        """
        if not np.isfinite(logits.max()):
            raise EngineFailed(f"the logits of position {position} are not finite")
        token = self._draw(self._changed(logits), position)
        self._note(token)
        return token

    def _note(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1

    def _changed(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The logits with biases and penalties, or these very ones where there are none."""
        is_penalised = bool(self._counts) and (self._presence != 0.0 or self._frequency != 0.0)
        if not is_penalised and not len(self._biased):
            return logits
        logits = logits.copy()
        logits[self._biased] += self._biases
        if is_penalised:
            tokens = np.array(sorted(self._counts), np.int64)
            counts = np.array([self._counts[each] for each in tokens.tolist()], np.float32)
            logits[tokens] -= np.float32(self._presence) + np.float32(self._frequency) * counts
        return logits

    def _draw(self, logits: npt.NDArray[np.float32], position: int) -> int:
        if self._parameters.temperature <= 0.0:
            return int(np.argmax(logits))
        self._view["id"] = self._ids
        self._view["logit"] = logits
        self._view["p"] = 0.0
        array = llama_cpp.llama_token_data_array(
            ctypes.cast(self._candidates, llama_cpp.llama_token_data_p), len(self._candidates), -1, False
        )
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        kept = np.ctypeslib.as_array(array.data, shape=(array.size,))
        return draw_token(
            kept["id"].astype(np.int32),
            kept["logit"].astype(np.float32),
            uniform_draw(self._parameters.seed, position),
        )

    def close(self) -> None:
        """Free the filter chain now; nothing may be sampled any more."""
        self._free()
