"""What is believed of a vocabulary that another process tells."""

from __future__ import annotations

from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.tokenizer.vocabulary import Vocabulary, decoded_vocabulary, vocabulary_of
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.limits import END_TOKENS_MAX

ENDS = array("I", [1, 1, 4]).tobytes()
GOOD: list[Any] = [ENDS, b"abcd", "<s>", "</s>", [0, 2], "{{ x }}"]


def told(*changes: tuple[int, Any]) -> bytes:
    fields = list(GOOD)
    for index, value in changes:
        fields[index] = value
    return bytes(msgpack.packb(fields))


@given(pieces=st.lists(st.binary(max_size=8), max_size=40), template=st.none() | st.text(max_size=9))
def test_every_token_keeps_its_bytes(pieces: list[bytes], template: str | None) -> None:
    made = vocabulary_of(pieces, "<s>", "", list(range(len(pieces))), template)
    read = decoded_vocabulary(made.encode())
    assert read == made
    assert [read.bytes_of(token) for token in range(-1, len(pieces) + 1)] == [b"", *pieces, b""]
    assert len(read.stop_token_ids) == min(len(pieces), END_TOKENS_MAX)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        told()[:-1],
        told() + b"\0",
        bytes(msgpack.packb(GOOD[:5])),
        told((0, ENDS[:-1])),
        told((0, array("I", [4, 1, 4]).tobytes())),
        told((0, array("I", [1, 2, 3]).tobytes())),
        told((0, array("I", [1, 2, 5]).tobytes())),
        told((1, "abcd")),
        told((2, "a" * 4097)),
        told((3, None)),
        told((4, [3])),
        told((4, [-1])),
        told((4, [True])),
        told((4, [2, 0])),
        told((4, [0, 0])),
        told((4, "02")),
        told((5, b"x")),
    ],
)
def test_what_cannot_be_is_not_believed(data: bytes) -> None:
    assert isinstance(decoded_vocabulary(told()), Vocabulary)
    with pytest.raises(ModelUnusable):
        decoded_vocabulary(data)
