"""Two recordings of one workload, compared at every level that both have something to say about.

Decides what can be compared: logits and perplexity always, hidden states and choices where both were looked
into, continuations and cloze answers where both were asked. The tolerance of logits is the swarm manifest's
default. Each level's arithmetic is in its own module; this one only puts them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvasir_node.measure.decisions import DecisionComparison, compare_choices
from kvasir_node.measure.drift import DriftComparison, compare_hidden
from kvasir_node.measure.generation import GenerationComparison, compare_continuations
from kvasir_node.measure.recording import Recording
from kvasir_node.measure.statistics import LogitsComparison, Scored, compare_logits
from kvasir_node.measure.task import ClozeComparison, compare_cloze
from kvasir_proto.errors import UsageError
from kvasir_proto.swarm_manifest import Thresholds

THRESHOLDS: Final = Thresholds()
"""What a swarm whose manifest says nothing else allows."""


@dataclass(frozen=True, slots=True)
class LevelsComparison:
    """What two sides differ by; a level that one of them cannot answer is None."""

    base: str
    run: str
    positions: int
    logits: LogitsComparison | None
    drift: DriftComparison | None
    decisions: DecisionComparison | None
    generation: GenerationComparison | None
    cloze: ClozeComparison | None

    @property
    def reason(self) -> str:
        """Why the logits are surely out of tolerance, the whole interval of a figure: empty where they are
        not, or were not compared.
        """
        if self.logits is None:
            return ""
        least, most = THRESHOLDS.top1_agreement_min, THRESHOLDS.mean_kld_max
        if self.logits.top1_95.high < least:
            return f"{100 * self.logits.top1_agreement:.2f} % have the same top token, not {100 * least} %"
        if self.logits.mean_kld_95.low > most:
            return f"mean KLD is {self.logits.mean_kld:.2g}, over {most:g}"
        return ""


def compare_recordings(base: Recording, run: Recording, scored: Scored = "all") -> LevelsComparison:
    """Compare `run` with `base`; `scored` says which positions' logits count.

    Raises `UsageError` when they were asked different things.
    """
    ours, theirs = base.workload, run.workload
    if ours.model_digest != theirs.model_digest:
        raise UsageError(f"{base.side} and {run.side} are of two different models")
    if (ours.windows, ours.singly) != (theirs.windows, theirs.singly):
        raise UsageError(f"{base.side} and {run.side} were asked different texts")
    seen = None if base.traces is None or run.traces is None else (base.traces, run.traces)
    same_prompts = (ours.prompts, ours.n_generated) == (theirs.prompts, theirs.n_generated)
    same_items = ours.items == theirs.items
    return LevelsComparison(
        base=base.side,
        run=run.side,
        positions=len(ours.tokens),
        logits=(
            compare_logits(base.logits, run.logits, ours.tokens, ours.lengths, scored)
            if ours.windows
            else None
        ),
        drift=None if seen is None else compare_hidden(*seen),
        decisions=None if seen is None else compare_choices(*seen),
        generation=(
            compare_continuations(base.continuations, run.continuations)
            if same_prompts and ours.prompts
            else None
        ),
        cloze=compare_cloze(ours.items, base.scores, run.scores) if same_items and ours.items else None,
    )
