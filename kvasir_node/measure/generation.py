"""Level "generation stability": where two greedy continuations of one prompt first differ.

Decides what agreement of texts is: the share of the longer one that comes before the first difference, and a
text that ended where the other went on differs there. It refuses to know who wrote them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_node.measure.in_process import Continuation
from kvasir_node.measure.intervals import Interval, share_interval


@dataclass(frozen=True, slots=True)
class Divergence:
    """One prompt: `first` is the index of the first different token, None where there is none; `margin` how
    far the base's token was ahead of its second there, where somebody saw it.
    """

    first: int | None
    n_tokens: int
    agreement: float
    margin: float | None


@dataclass(frozen=True, slots=True)
class GenerationComparison:
    """All prompts."""

    prompts: tuple[Divergence, ...]
    identical: int
    identical_share: float
    identical_95: Interval
    mean_agreement: float
    median_first_divergence: float | None
    earliest_divergence: int | None


def compare_continuations(base: Sequence[Continuation], run: Sequence[Continuation]) -> GenerationComparison:
    """Compare continuations of the same prompts, in the same order."""
    prompts = tuple(first_divergence(a, b) for a, b in zip(base, run, strict=True))
    firsts = [each.first for each in prompts if each.first is not None]
    identical = len(prompts) - len(firsts)
    return GenerationComparison(
        prompts=prompts,
        identical=identical,
        identical_share=identical / len(prompts) if prompts else 1.0,
        identical_95=share_interval(identical, len(prompts)),
        mean_agreement=statistics.fmean(each.agreement for each in prompts) if prompts else 1.0,
        median_first_divergence=statistics.median(firsts) if firsts else None,
        earliest_divergence=min(firsts) if firsts else None,
    )


def first_divergence(base: Continuation, run: Continuation) -> Divergence:
    """Where two continuations part."""
    length = max(len(base.tokens), len(run.tokens))
    both = zip(base.tokens, run.tokens, strict=False)
    first = next((index for index, (a, b) in enumerate(both) if a != b), None)
    if first is None and len(base.tokens) != len(run.tokens):
        first = min(len(base.tokens), len(run.tokens))
    margin = None
    if first is not None and base.margins is not None and first < len(base.margins):
        margin = base.margins[first]
    return Divergence(first, length, 1.0 if first is None else first / length, margin)
