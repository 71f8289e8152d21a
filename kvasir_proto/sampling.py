"""How a session's next token is drawn: the seed and the filters, as every message that asks for text says it.

Apart from messages because requests of clients, sessions of engines and the sampler itself share it, defaults
included. It draws nothing: that is done once, on the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir_proto.limits import LogitBiases, Penalty, Probability, Seed, Temperature, TopK


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch their filter off."""

    seed: Seed = 0
    temperature: Temperature = 0.8
    top_k: TopK = 40
    top_p: Probability = 0.95
    min_p: Probability = 0.05


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How a client of the gateway wants tokens drawn.

    Before the filters of ``draw``, each token's logit grows by its bias in ``logit_bias`` (pairs of token and
    bias, in the order of tokens) and shrinks by ``presence_penalty`` if it was generated in this session
    already, and by ``frequency_penalty`` for each time that it was. Log-probabilities are told without these.
    """

    draw: Sampling = Sampling()
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBiases = ()
