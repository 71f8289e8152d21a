"""Whether one node's rows are those of an honest kernel: evidence that is added up row by row, for ever.

Each row is a bet against "this node is honest" whose value an honest node leaves at 1 or less on average:
`1 + a (d / p - 1) + b (f / q - 1)`, where d and f say whether it differs and whether nothing explains that,
and p and q are the most often that this happens to honest nodes. Multiplied from any row on, such values
make a nonnegative supermartingale, and so does their sum over all beginnings that each put in an equal, small
part of one stake. By Ville's inequality it reaches 1 / `ERROR_MAX` with at most that chance, however often it
is looked at (Vovk and Wang, E-values, 2021; Shiryaev and Roberts for the sum over beginnings). Half of the
stake is on the node as a whole and half on its single experts, so that one wrong expert among thousands is
found as well; half of each bets much a row and half little, for faults in every row and in a few.

It refuses to know which node it is about, and what a row was. Floats are only added and multiplied.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from kvasir_proto.audit.finding import Finding

ERROR_MAX: Final = 8e-4
"""Chance that an honest node is ever accused by this within a lifetime. Drift takes the rest of 1e-3."""
LIFETIME_ROWS: Final = 40_000
"""Audited rows over which a node's stake is spread: those of a million rows that it served, 15,625 at one in
64, and those of its probation. With each further lifetime the chance is taken once more."""
FOREIGN_CHANCE: Final = 1e-4
"""The most often that an honest row differs by something that flips do not explain. None of the recorded did
(docs/reference/audit.md)."""
STRATA_MAX: Final = 1 << 14
"""Experts of one node whose evidence is kept apart; beyond, the one with the least is forgotten."""

_BETS: Final = ((0.3, 0.5), (0.01, 0.02))
"""Parts of the stake on "it differs" and on "nothing explains it", for every row."""
_ENOUGH: Final = 1e9
"""What is reached is not counted any further: products would overflow."""

_Wealth: TypeAlias = tuple[float, float]
"""By bet."""
_NOTHING: Final[_Wealth] = (0.0, 0.0)
_PUT_IN: Final = 1 / LIFETIME_ROWS


class SequentialTest:
    """The evidence against one node. It only grows where rows differ, and shrinks where they do not."""

    def __init__(self) -> None:
        self._whole: _Wealth = _NOTHING
        self._strata: dict[tuple[int, int], _Wealth] = {}
        self._of_strata = 0.0
        self.n_rows = 0

    @property
    def evidence(self) -> float:
        """At most 1 on average for an honest node; over 1 / `ERROR_MAX` it is accused."""
        return (self._whole[0] + self._whole[1] + self._of_strata) / (2 * len(_BETS))

    @property
    def is_convinced(self) -> bool:
        """Whether an honest node would hardly ever come to this."""
        return self.evidence * ERROR_MAX >= 1

    def add(self, finding: Finding) -> None:
        """Take in one row; one that says nothing changes nothing."""
        if finding.outcome == "void":
            return
        self.n_rows += 1
        factors = _factors(finding)
        self._whole = _grown(self._whole, factors)
        key = (finding.layer, finding.expert)
        before = self._strata.get(key, _NOTHING)
        after = self._strata[key] = _grown(before, factors)
        self._of_strata = max(0.0, self._of_strata + after[0] + after[1] - before[0] - before[1])
        if len(self._strata) > STRATA_MAX:
            least = min(self._strata, key=lambda each: (sum(self._strata[each]), each))
            self._of_strata = max(0.0, self._of_strata - sum(self._strata.pop(least)))


def _factors(finding: Finding) -> _Wealth:
    """What each bet becomes by this row."""
    if finding.outcome == "same":
        return _OF_SAME
    chance = min(1.0, max(finding.flip_chance, FOREIGN_CHANCE) + FOREIGN_CHANCE)
    foreign = 1 / FOREIGN_CHANCE if finding.outcome == "foreign" else 0.0
    one, other = (1 + on_any * (1 / chance - 1) + on_foreign * (foreign - 1) for on_any, on_foreign in _BETS)
    return one, other


def _factors_of_same() -> _Wealth:
    one, other = (1 - on_any - on_foreign for on_any, on_foreign in _BETS)
    return one, other


_OF_SAME: Final = _factors_of_same()


def _grown(wealth: _Wealth, factors: _Wealth) -> _Wealth:
    return (
        min(_ENOUGH, (wealth[0] + _PUT_IN) * factors[0]),
        min(_ENOUGH, (wealth[1] + _PUT_IN) * factors[1]),
    )
