"""A ubatch is decoded again as often as there is hope, and never where the trunk stands elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from kvasir_node.backbone.patient_decode import DECODES_MAX, decode_patiently
from kvasir_node.backbone.trunk import Trunk
from kvasir_proto.errors import EngineFailed, NoHolderLeft


class Failing:
    """Fails so often, and may forget where it stood."""

    def __init__(
        self, n_failures: int, *, forgets: bool = False, error: type[Exception] = NoHolderLeft
    ) -> None:
        self.position, self.n_failures, self.forgets, self.error = 5, n_failures, forgets, error
        self.decoded: list[list[int]] = []

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> None:
        assert all_logits
        self.decoded.append(list(tokens))
        if self.n_failures:
            self.n_failures -= 1
            self.position = 0 if self.forgets else self.position
            raise self.error("layer 2, experts 7")
        self.position += len(tokens)


def decode(trunk: Failing, answers: Sequence[bool]) -> None:
    left = list(answers)
    try:
        decode_patiently(cast(Trunk, trunk), [1, 2], lambda: left.pop(0), all_logits=True)
    finally:
        assert left == []


def test_a_ubatch_is_decoded_again_once_there_is_a_holder() -> None:
    trunk = Failing(2)
    decode(trunk, [True, True])
    assert (trunk.decoded, trunk.position) == ([[1, 2]] * 3, 7)


@pytest.mark.parametrize(
    "trunk, answers",
    [
        (Failing(9), [True] * (DECODES_MAX - 1)),
        (Failing(9), [True, False]),
        (Failing(9, forgets=True), []),
        (Failing(9, error=EngineFailed), []),
    ],
)
def test_it_ends_where_there_is_no_hope(trunk: Failing, answers: list[bool]) -> None:
    with pytest.raises(trunk.error):
        decode(trunk, answers)
    assert len(trunk.decoded) == len(answers) + (not answers or answers[-1])
