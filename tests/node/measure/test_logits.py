"""What a measurement of logits feeds: chunks and tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.measure.logits import (
    check_tokens,
    count_ubatches,
    default_chunks,
    parse_chunks,
    random_tokens,
    require_space,
)
from kvasir_proto.errors import ModelUnusable, UsageError


@pytest.mark.parametrize("n_tokens, expected", [(1, (1,)), (2, (1, 1)), (3, (2, 1)), (8, (4, 1, 1, 1, 1))])
def test_half_is_a_prompt_and_half_is_decoded(n_tokens: int, expected: tuple[int, ...]) -> None:
    assert default_chunks(n_tokens) == expected


@pytest.mark.parametrize(
    "text, expected", [("5", (5,)), ("256,1x3", (256, 1, 1, 1)), (" 2x2 , 7", (2, 2, 7))]
)
def test_chunks_are_written_briefly(text: str, expected: tuple[int, ...]) -> None:
    assert parse_chunks(text, "--chunks") == expected


@pytest.mark.parametrize("text", ["", "0", "3x0", "x3", "1,,2", "-1", "1.5", "²", "1x262145", "9999999"])
def test_other_chunks_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--chunks takes "):
        parse_chunks(text, "--chunks")


def test_ubatches_are_counted_as_llama_cpp_cuts_them() -> None:
    assert count_ubatches((1, 1, 1), 4) == 3
    assert count_ubatches((8, 9), 4) == 2 + 3


def test_random_tokens_are_the_same_everywhere_and_in_the_vocabulary() -> None:
    assert random_tokens(6, 100, 0) == (85, 63, 51, 26, 30, 4)
    assert random_tokens(6, 100, 1) != random_tokens(6, 100, 0)
    assert set(random_tokens(200, 3, 7)) == {0, 1, 2}


def test_logits_that_would_fill_the_disk_are_not_begun(tmp_path: Path) -> None:
    require_space(tmp_path, 10, 100)
    with pytest.raises(ModelUnusable, match="fewer positions"):
        require_space(tmp_path, 1 << 18, 1 << 40)


def test_a_token_outside_the_vocabulary_is_named() -> None:
    check_tokens((0, 95), 96)
    check_tokens((2**31 - 1,), 0)
    with pytest.raises(UsageError, match=r"^token id 96 is outside the vocabulary of 96$"):
        check_tokens((3, 96, 97), 96)
