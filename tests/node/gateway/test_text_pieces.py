"""Stop strings and UTF-8: whatever the splits, what was sent is the reference, without a stop string."""

from __future__ import annotations

import codecs
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvasir_node.gateway.text_pieces import TextPieces


def reference(data: bytes, stop_strings: list[str]) -> tuple[str, bool]:
    """By one character after another: cut where the first stop string is complete, the longest of these."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    for end in range(1, len(text) + 1):
        lengths = [len(each) for each in stop_strings if text[:end].endswith(each)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


def run(pieces: list[bytes], stop_strings: list[str]) -> tuple[list[str], list[int], bool]:
    """What was sent, the tokens that went with it, and whether a stop string ended it."""
    texts: list[str] = []
    tags: list[int] = []
    made: TextPieces[int] = TextPieces(stop_strings)
    for index, piece in enumerate(pieces):
        sent = made.add(piece, index)
        texts.append(sent.text)
        tags.extend(sent.tags)
        if made.is_stopped:
            break
    last = made.end()
    return [*texts, last.text], [*tags, *last.tags], made.is_stopped


# Few characters, so that stop strings are met, begun in vain and overlap; some of several bytes.
CHARACTERS = "aé😀"
stop_lists = st.lists(st.text(CHARACTERS, min_size=1, max_size=5), max_size=4)
texts = st.text(CHARACTERS, max_size=40).map(str.encode)
noise = st.lists(
    st.sampled_from([*(each.encode() for each in CHARACTERS), b"\xff", b"\xe2", b"\xe2\x82", b"\xf0\x9f"])
).map(b"".join)


@given(st.one_of(texts, noise), stop_lists, st.data())
def test_whatever_the_splits_the_text_is_the_reference(
    data: bytes, stop_strings: list[str], draw: st.DataObject
) -> None:
    cuts = draw.draw(st.lists(st.integers(0, len(data)), max_size=len(data) + 3))
    edges = [0, *sorted(cuts), len(data)]
    pieces = [data[low:high] for low, high in itertools.pairwise(edges)]
    sent, tags, is_stopped = run(pieces, stop_strings)
    text, must_stop = reference(data, stop_strings)
    assert ("".join(sent), is_stopped) == (text, must_stop)
    assert tags == list(range(len(tags))), "tokens leave in order, each once"
    if not is_stopped:
        assert len(tags) == len(pieces)


@given(texts, stop_lists)
def test_no_token_that_a_stop_string_touches_is_told_of(data: bytes, stop_strings: list[str]) -> None:
    pieces = [data[index : index + 1] for index in range(len(data))]
    _, tags, is_stopped = run(pieces, stop_strings)
    text, _ = reference(data, stop_strings)
    if is_stopped:
        assert b"".join(pieces[: len(tags)]) == text.encode()


@given(texts, stop_lists)
def test_nothing_waits_that_no_stop_string_can_begin_with(data: bytes, stop_strings: list[str]) -> None:
    made: TextPieces[None] = TextPieces(stop_strings)
    sent = ""
    for character in data.decode():
        sent += made.add(character.encode(), None).text
        if made.is_stopped:
            return
        so_far = data.decode()[: len(sent)]
        assert sent == so_far
    held = data.decode()[len(sent) :]
    assert not held or any(each.startswith(held) for each in stop_strings)


@pytest.mark.parametrize(
    "pieces, stop_strings, sent",
    [
        ([b"Hello"], [], ["Hello", ""]),
        ([b"Hel", b"lo"], ["lo"], ["He", "l", ""]),
        ([b"Hel", b"l", b"p"], ["lo"], ["He", "l", "lp", ""]),
        # Complete first, although the other one began before it.
        ([b"abcd"], ["abcde", "bc"], ["a", ""]),
        ([b"abcd"], ["abcd", "bc"], ["a", ""]),
        ([b"ab", b"c"], ["x", "abc"], ["", "", ""]),
        # Complete at the same character: the longest.
        ([b"abc"], ["c", "bc"], ["a", ""]),
        # A character over three tokens, and one that never ends.
        ([b"\xe2", b"\x82", b"\xac", b"\xe2\x82"], [], ["", "", "€", "", ""]),
        ([b"a\xff", b"b"], [], ["a\N{REPLACEMENT CHARACTER}", "b", ""]),
    ],
)
def test_pieces(pieces: list[bytes], stop_strings: list[str], sent: list[str]) -> None:
    assert run(pieces, stop_strings)[0] == sent
