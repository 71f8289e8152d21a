"""Sampling: which token a session emits, decided once, on its backbone.

llama.cpp's filters (top-k, top-p, min-p, temperature) shape the distribution; the random draw is ours. It is
counter-based (Philox, Salmon et al. 2011): a pure function of (seed, position), with no state to carry, so a
continuation on another backbone draws the same numbers. The module refuses to know sessions and contexts.
"""

from __future__ import annotations

import ctypes

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvasir_proto.errors import EngineFailed
from kvasir_proto.sampling import Sampling


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


class Sampler:
    """One session's sampler over logits of shape [n_vocab]."""

    def __init__(self, parameters: Sampling, n_vocab: int) -> None:
        self._parameters = parameters
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

    def sample(self, logits: npt.NDArray[np.float32], position: int) -> int:
        """The token for ``position``, given its logits of shape [n_vocab]. Lowest id wins a greedy tie.

        Raises `EngineFailed` for logits that make no distribution: a NaN would win every comparison.
        """
        if not np.isfinite(logits.max()):
            raise EngineFailed(f"the logits of position {position} are not finite")
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
        """Free the filter chain."""
        if self._chain is not None:
            llama_cpp.llama_sampler_free(self._chain)
            self._chain = None
