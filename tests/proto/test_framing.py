"""Any split of a stream gives the same frames, and nothing makes the reader hold more than its limit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.framing import HEADER_SIZE, FrameReader, frame

LIMIT = 64

bodies = st.lists(st.binary(max_size=LIMIT), max_size=8)
cuts = st.lists(st.integers(0, 600), max_size=12)


def _chunks(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(stream)) for place in places), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]


def _read(chunks: list[bytes]) -> tuple[list[bytes], str | None]:
    """The bodies, and the code of the error that ended the stream."""
    reader, found = FrameReader(LIMIT), []
    try:
        for chunk in chunks:
            for body in reader.feed(chunk):
                found.append(body)  # noqa: PERF402  # those before an error must be kept
        reader.finish()
    except RemoteProtocolError as error:
        return found, error.code
    return found, None


@given(bodies, cuts)
def test_any_split_gives_the_same_frames(bodies: list[bytes], places: list[int]) -> None:
    stream = b"".join(frame(body, LIMIT) for body in bodies)
    assert _read(_chunks(stream, places)) == (bodies, None)


@given(st.binary(max_size=300), cuts)
def test_any_split_of_any_stream_ends_alike(stream: bytes, places: list[int]) -> None:
    assert _read(_chunks(stream, places)) == _read([stream])


@given(bodies, st.integers(LIMIT + 1, 2**32 - 1), st.binary(max_size=20), cuts)
def test_good_frames_before_an_oversize_one_are_given(
    bodies: list[bytes], size: int, rest: bytes, places: list[int]
) -> None:
    stream = b"".join(frame(body, LIMIT) for body in bodies) + size.to_bytes(4, "big") + rest
    assert _read(_chunks(stream, places)) == (bodies, "oversize")


@given(bodies.filter(bool), st.data())
def test_stream_that_ends_within_a_frame_is_truncated(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frame(body, LIMIT) for body in bodies)
    last = HEADER_SIZE + len(bodies[-1])
    missing = data.draw(st.integers(1, last - 1))
    assert _read([stream[:-missing]]) == (bodies[:-1], "truncated")


def test_after_an_error_there_are_no_frames_any_more() -> None:
    reader = FrameReader(LIMIT)
    with pytest.raises(RemoteProtocolError):
        list(reader.feed((LIMIT + 1).to_bytes(4, "big")))
    with pytest.raises(RemoteProtocolError) as caught:
        reader.feed(frame(b"good", LIMIT))
    assert caught.value.code == "oversize"
    with pytest.raises(RemoteProtocolError):
        reader.finish()


def test_bodies_left_in_the_iterator_are_given_next_time() -> None:
    reader = FrameReader(LIMIT)
    reader.feed(frame(b"first", LIMIT))
    assert list(reader.feed(frame(b"second", LIMIT))) == [b"first", b"second"]


def test_body_at_the_limit_passes_and_one_byte_more_is_ours_to_refuse() -> None:
    assert list(FrameReader(LIMIT).feed(frame(bytes(LIMIT), LIMIT))) == [bytes(LIMIT)]
    with pytest.raises(LocalProtocolError, match="over the limit"):
        frame(bytes(LIMIT + 1), LIMIT)


@pytest.mark.parametrize("limit", [0, -1, 1 << 32])
def test_limits_that_cannot_be(limit: int) -> None:
    with pytest.raises(ValueError, match="limit"):
        FrameReader(limit)
