"""Anything an exception says can be made a sentence that may be sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.codec import decode, encode
from kvasir_proto.limits import SENTENCE_LENGTH_MAX, as_sentence
from kvasir_proto.messages.swarm import SWARM, Refusal

ANY_TEXT = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=50)


@given(ANY_TEXT, st.sampled_from([0, SENTENCE_LENGTH_MAX - 1, SENTENCE_LENGTH_MAX, SENTENCE_LENGTH_MAX + 1]))
def test_any_text_becomes_a_sentence(text: str, padding: int) -> None:
    message = Refusal("busy", as_sentence(text + "." * padding))
    assert decode(encode(message), SWARM) == message


def test_what_fits_is_kept_and_what_is_cut_shows_it() -> None:
    assert as_sentence("disk is full") == "disk is full"
    assert as_sentence("no file \udcff") == "no file ?"
    assert as_sentence("a\x1b[31mb\nc\x07") == "a\ufffd[31mb\ufffdc\ufffd"
    assert as_sentence("x" * SENTENCE_LENGTH_MAX) == "x" * SENTENCE_LENGTH_MAX
    assert as_sentence("x" * (SENTENCE_LENGTH_MAX + 1)) == "x" * (SENTENCE_LENGTH_MAX - 1) + "…"
