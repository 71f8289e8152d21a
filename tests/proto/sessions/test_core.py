"""What the core of sessions decides, on contexts that count every cell."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import SessionId
from kvasir_proto.instants import Instant, seconds
from kvasir_proto.sessions.options import SessionOptions, cells_within
from kvasir_proto.sessions.requests import (
    ClearCache,
    CopySequence,
    Decode,
    Decoded,
    DecodeFailed,
    EndAll,
    HoldersChanged,
    Sampled,
    Unsampled,
)
from tests.proto.sessions.toy_backbone import END, ToyBackbone, alone, next_token, small


def named(name: int) -> SessionId:
    return SessionId(name.to_bytes(16, "big"))


def lengths(decode: Decode) -> dict[int, int]:
    """How many places each session has in a ubatch."""
    counts: dict[int, int] = {}
    for place in decode.places:
        name = int.from_bytes(place.session, "big")
        counts[name] = counts.get(name, 0) + 1
    return counts


def endless(start: int, n_tokens: int = 40) -> list[int]:
    """A prompt of one token after which the toy model goes on for so long."""
    while END in alone([start], n_tokens, 10**6)[0] or len(alone([start], n_tokens, 10**6)[0]) < n_tokens:
        start += 1000
    return [start]


def test_a_session_alone_goes_in_whole_ubatches_from_an_empty_cache() -> None:
    backbone = ToyBackbone(small())
    seen = backbone.open(1, range(1, 41), 3)
    backbone.run()
    assert (seen.tokens, seen.end) == alone(range(1, 41), 3, 64)
    assert backbone.decodes[0].steps == (ClearCache(),)
    sizes = [len(each.places) for each in backbone.decodes]
    assert sizes[:4] == [16, 16, 8, 1]
    assert [each.is_sampled for each in backbone.decodes[2].places] == [False] * 7 + [True]
    backbone.open(2, [5, 6], 2)
    assert backbone.decodes[-1].steps[-1] == ClearCache(), "a second one begins as the first did"


def test_a_prompt_does_not_hold_up_who_decodes() -> None:
    backbone = ToyBackbone(small())
    backbone.open(1, endless(1), 20)
    backbone.step()
    backbone.open(2, range(1, 13), 1)
    backbone.step()
    assert [lengths(backbone.step()) for _ in range(3)] == [{1: 1, 2: 4}] * 3
    assert lengths(backbone.step()) == {1: 1}


def test_two_long_prompts_of_two_clients_advance_by_turns() -> None:
    backbone = ToyBackbone(small(n_cells=256))
    backbone.open(1, range(1, 65), 1, client="a")
    backbone.open(2, range(1, 33), 1, client="b")
    got: list[dict[int, int]] = []
    while backbone.decoding:
        got.append(lengths(backbone.step()))
    # The first ubatch was there before the second session; then who has had least, up to the end.
    assert got[:4] == [{1: 16}, {2: 16}, {1: 16}, {2: 16}]


def test_a_clients_tenth_session_waits_for_anothers_first() -> None:
    backbone = ToyBackbone(small(sessions_per_context=1))
    for name in range(10):
        backbone.open(name, endless(100 + name), 5, client="greedy")
    backbone.step()
    backbone.open(50, endless(7), 5, client="modest")
    order: list[int] = []
    while backbone.decoding:
        order += lengths(backbone.step())
    assert order.index(50) < order.index(1), "the next one after whoever ran already"


def test_new_names_do_not_starve_a_client() -> None:
    """A client that has had much is served all the same while ever new ones come."""
    backbone = ToyBackbone(small(sessions_per_context=1, waiting_max=40))
    patient = backbone.open(1, endless(1, 30), 30, client="patient")
    for _ in range(10):
        backbone.step()
    second = backbone.open(2, endless(2), 3, client="patient")
    name = 1000
    for _ in range(600):
        while backbone.core.n_waiting < 20:
            name += 1
            backbone.open(name, endless(name), 2, client=f"new {name}")
        backbone.step()
        if second.end:
            break
    assert patient.end == "length"
    assert second.end == "length"


def test_a_large_session_is_not_passed_for_ever_by_small_ones() -> None:
    backbone = ToyBackbone(small(n_contexts=2, waiting_max=40))
    name = 1000

    def keep_small_ones_coming() -> None:
        nonlocal name
        while backbone.core.n_waiting < 10:
            name += 1
            backbone.open(name, endless(name), 8, client=f"small {name % 5}")

    keep_small_ones_coming()
    large = backbone.open(1, range(1, 50), 60, client="large")
    for _ in range(400):
        keep_small_ones_coming()
        backbone.step(sorted(backbone.decoding)[_ % len(backbone.decoding)])
        if large.end:
            break
    assert large.end in ("length", "end_of_text")


@pytest.mark.parametrize(
    "prompt, n_tokens, code",
    [([], 3, "empty_prompt"), (list(range(1, 66)), 1, "prompt_too_long")],
)
def test_what_never_fits_is_refused_for_good(prompt: list[int], n_tokens: int, code: str) -> None:
    backbone = ToyBackbone(small())
    seen = backbone.open(1, prompt, n_tokens)
    assert (seen.end, seen.code, seen.retry_after) == ("refused", code, None)
    assert not backbone.decoding


def test_a_full_queue_refuses_with_the_time_to_come_again() -> None:
    backbone = ToyBackbone(small(sessions_per_context=1, waiting_max=2, waiting_per_client_max=1))
    backbone.open(1, endless(1), 5, client="a")
    backbone.open(2, endless(2), 5, client="a")
    of_client = backbone.open(3, endless(3), 5, client="a")
    backbone.open(4, endless(4), 5, client="b")
    of_all = backbone.open(5, endless(5), 5, client="c")
    assert (of_client.code, of_client.retry_after) == ("client_queue_full", seconds(1))
    assert (of_all.code, of_all.retry_after) == ("queue_full", seconds(1))
    backbone.now = Instant(seconds(30))
    backbone.run()
    backbone.open(10, endless(1), 5, client="a")
    backbone.open(11, endless(1), 5, client="a")
    later = backbone.open(12, endless(1), 5, client="a")
    assert later.retry_after is not None
    assert seconds(1) < later.retry_after < seconds(30), "sessions took 30 s, and then none"


@pytest.mark.parametrize("n_emitted", [0, 1, 5])
def test_one_session_in_a_context_goes_on_in_the_shapes_of_the_first_time(n_emitted: int) -> None:
    """Also after a failure that lost all of the cache."""
    options = small(sessions_per_context=1, kept_prefixes=0)
    first = ToyBackbone(options)
    prompt = [*endless(1), *range(2, 21)]
    whole = first.open(1, prompt, 12)
    first.run()
    sizes = [len(each.places) for each in first.decodes]
    assert sizes == [16, 4, *[1] * (len(whole.tokens) - 1)]
    second = ToyBackbone(options)
    rest = second.open(1, [*prompt, *whole.tokens[:n_emitted]], 12 - n_emitted, n_emitted=n_emitted)
    second.run()
    assert [len(each.places) for each in second.decodes] == sizes
    assert rest.tokens == whole.tokens[n_emitted:]
    third = ToyBackbone(options)
    third.open(1, prompt, 12)
    for _ in range(5):
        third.step(0)
    n_before = len(third.decodes)
    third.step(fails=lambda _: DecodeFailed("", "", (), is_aborted=True), n_left=1)
    third.run()
    assert [len(each.places) for each in third.decodes[n_before:]] == sizes


def test_sessions_together_go_on_in_as_few_ubatches_as_there_can_be() -> None:
    backbone = ToyBackbone(small())
    backbone.open(1, range(1, 41), 3, n_emitted=20)
    backbone.run()
    assert [len(each.places) for each in backbone.decodes][:3] == [16, 16, 8]


def test_prompts_that_wait_are_bounded_in_tokens() -> None:
    backbone = ToyBackbone(small(sessions_per_context=1, waiting_tokens_max=50))
    backbone.open(1, [1], 5)
    backbone.open(2, range(1, 41), 5)
    assert backbone.open(3, range(1, 41), 5).code == "queue_full"
    backbone.cancel(2)
    assert backbone.open(4, range(1, 41), 5).end == ""


def test_whoever_waits_too_long_is_told_to_come_again() -> None:
    backbone = ToyBackbone(small(sessions_per_context=1, waiting_time_max=seconds(5)))
    backbone.open(1, endless(1), 5)
    waiting = backbone.open(2, endless(2), 5)
    assert backbone.core.next_deadline() == Instant(seconds(5))
    backbone.tick(seconds(5) - 1)
    assert waiting.end == ""
    backbone.tick(seconds(5))
    assert (waiting.end, waiting.code, waiting.retry_after) == ("refused", "waited_too_long", seconds(1))


def test_a_deadline_ends_a_session_whatever_it_does() -> None:
    backbone = ToyBackbone(small(sessions_per_context=1))
    running = backbone.open(1, endless(1), 30, deadline=Instant(100))
    waiting = backbone.open(2, endless(2), 30, deadline=Instant(50))
    backbone.step()
    assert backbone.core.next_deadline() == 50
    backbone.tick(50)
    assert (waiting.end, waiting.code, running.end) == ("failed", "session_deadline_expired", "")
    backbone.tick(100)
    assert (running.end, running.code, len(running.tokens)) == ("failed", "session_deadline_expired", 1)
    assert backbone.aborts == [0], "nobody wants that ubatch any more"
    backbone.run()
    assert backbone.core.n_sessions == backbone.core.cells(0).n_promised == 0


def test_cancelling_ends_at_once_and_frees_the_cells_after_the_ubatch() -> None:
    backbone = ToyBackbone(small())
    one, other = backbone.open(1, endless(1), 30), backbone.open(2, endless(2), 30)
    backbone.step()
    backbone.cancel(1)
    assert one.end == "cancelled"
    assert backbone.aborts == [], "somebody still wants that ubatch"
    promised = backbone.core.cells(0).n_promised
    backbone.step()
    assert backbone.core.cells(0).n_promised < promised
    backbone.cancel(2)
    assert (other.end, backbone.aborts) == ("cancelled", [0])
    backbone.step(fails=lambda _: DecodeFailed("", "", (), is_aborted=True))
    assert not backbone.decoding
    backbone.cancel(77)


def test_all_end_where_nothing_may_be_generated_any_more() -> None:
    backbone = ToyBackbone(small(sessions_per_context=1))
    all_seen = [backbone.open(name, endless(name), 30) for name in (1, 2, 3)]
    backbone.command(EndAll("lease_expired", "over"))
    assert {(each.end, each.code) for each in all_seen} == {("failed", "lease_expired")}
    backbone.run()
    assert backbone.core.cells(0).n_promised == 0


def test_a_full_context_is_a_length_stop() -> None:
    backbone = ToyBackbone(small(n_cells=12))
    seen = backbone.open(1, endless(1), 1000)
    backbone.run()
    assert (seen.end, len(seen.tokens)) == ("length", 12)


def test_a_token_that_the_client_names_ends_the_text() -> None:
    backbone = ToyBackbone(small())
    prompt = endless(3)
    tokens, _ = alone(prompt, 10, 64)
    seen = backbone.open(1, prompt, 10, end_tokens=frozenset({tokens[4]}))
    backbone.run()
    first = tokens.index(tokens[4])
    assert (seen.tokens, seen.end) == (tokens[:first], "end_of_text")


def test_logits_that_give_no_token_fail_one_session_alone() -> None:
    backbone = ToyBackbone(small())
    one, other = backbone.open(1, endless(1), 5), backbone.open(2, endless(2), 5)
    backbone.step()
    decode = backbone.decoding.pop(0)
    backbone.caches[0].apply(decode)
    samples = [
        Unsampled(each.session, "engine_failed", "not finite")
        for each in decode.places
        if each.session == named(1)
    ]
    good = [each for each in decode.places if each.session == named(2)]
    token = next_token(backbone.caches[0].tokens(good[0].sequence))
    backbone.core.receive(Decoded((*samples, Sampled(named(2), token))), 0, backbone.now)
    backbone.drain()
    assert (one.end, one.code) == ("failed", "engine_failed")
    backbone.run()
    assert (other.tokens, other.end) == alone(endless(2), 5, 64)


def test_a_context_that_says_what_cannot_be_is_refused() -> None:
    backbone = ToyBackbone(small())
    with pytest.raises(LocalProtocolError):
        backbone.core.receive(Decoded(()), 0, backbone.now)
    backbone.open(1, [1], 3)
    with pytest.raises(LocalProtocolError):
        backbone.core.receive(Decoded(()), 0, backbone.now)
    with pytest.raises(LocalProtocolError):
        backbone.open(1, [1], 3)


# -- ubatches that fail --------------------------------------------------------------------------------------


def poisoned_by(*names: int, is_for_want_of_holders: bool = False) -> Callable[[Decode], DecodeFailed | None]:
    def fails(decode: Decode) -> DecodeFailed | None:
        if any(each.session in map(named, names) for each in decode.places):
            return DecodeFailed("engine_failed", "of it", (), is_for_want_of_holders=is_for_want_of_holders)
        return None

    return fails


@pytest.mark.parametrize("bad", [(1,), (4,), (2, 3), (1, 2, 3, 4)])
def test_who_makes_a_ubatch_fail_is_found_and_the_others_go_on(bad: tuple[int, ...]) -> None:
    backbone = ToyBackbone(small())
    seen = {name: backbone.open(name, endless(name), 6) for name in (1, 2, 3, 4)}
    for _ in range(3):
        backbone.step()
    n_steps = 0
    while backbone.decoding:
        backbone.step(fails=poisoned_by(*bad))
        n_steps += 1
    for name, each in seen.items():
        if name in bad:
            assert (each.end, each.code) == ("failed", "engine_failed")
        else:
            assert (each.tokens, each.end) == alone(endless(name), 6, 64)
    assert n_steps < 30


def test_who_is_left_of_a_failed_ubatch_is_not_blamed_for_who_has_gone() -> None:
    backbone = ToyBackbone(small())
    innocent, guilty = backbone.open(1, endless(1), 6), backbone.open(2, endless(2), 6)
    backbone.step()
    backbone.step()
    backbone.cancel(2)
    backbone.step(fails=poisoned_by(2))
    backbone.run()
    assert (innocent.tokens, innocent.end) == alone(endless(1), 6, 64)
    assert guilty.end == "cancelled"


def test_sessions_without_a_holder_are_set_aside_and_tried_again() -> None:
    backbone = ToyBackbone(small(coverage_patience=seconds(10)))
    seen = {name: backbone.open(name, endless(name), 6) for name in (1, 2, 3)}
    backbone.step()
    backbone.step()

    def lacks_holder(decode: Decode) -> DecodeFailed | None:
        if any(each.session == named(2) for each in decode.places):
            return DecodeFailed("no_holder_left", "layer 2", (), frozenset({named(2)}), True)
        return None

    backbone.now = Instant(seconds(3))
    while backbone.decoding:
        backbone.step(fails=lacks_holder)
    assert [seen[name].end for name in (1, 2, 3)] == ["length", "", "length"]
    assert backbone.core.next_deadline() == Instant(seconds(13))
    backbone.command(HoldersChanged())
    backbone.run()
    assert (seen[2].tokens, seen[2].end) == alone(endless(2), 6, 64)


def test_a_session_is_set_aside_for_so_long_and_tried_so_often() -> None:
    backbone = ToyBackbone(small(coverage_patience=seconds(10), tries_max=3))
    late, often = backbone.open(1, endless(1), 6), backbone.open(2, endless(2), 6)
    backbone.step(fails=poisoned_by(1, 2, is_for_want_of_holders=True))
    while backbone.decoding:
        backbone.step(fails=poisoned_by(1, 2, is_for_want_of_holders=True))
    backbone.tick(seconds(9))
    backbone.command(HoldersChanged())
    while backbone.decoding:
        backbone.step(fails=poisoned_by(1, 2, is_for_want_of_holders=True))
    assert late.end == often.end == ""
    backbone.tick(seconds(10))
    assert (late.end, late.code) == ("failed", "engine_failed")

    backbone = ToyBackbone(small(coverage_patience=seconds(10), tries_max=3))
    often = backbone.open(2, endless(2), 6)
    for _ in range(3):
        backbone.step(fails=poisoned_by(2, is_for_want_of_holders=True))
        backbone.command(HoldersChanged())
    assert (often.end, often.code) == ("failed", "engine_failed")


def test_a_session_that_gets_on_is_tried_as_often_again() -> None:
    backbone = ToyBackbone(small(coverage_patience=seconds(10), tries_max=3))
    seen = backbone.open(2, endless(2), 6)
    for _ in range(3):
        for _ in range(2):
            backbone.step(fails=poisoned_by(2, is_for_want_of_holders=True))
            backbone.now = Instant(backbone.now + seconds(4))
            backbone.command(HoldersChanged())
        backbone.step()
    backbone.run()
    assert (seen.tokens, seen.end) == alone(endless(2), 6, 64)


def test_without_patience_nobody_is_set_aside() -> None:
    backbone = ToyBackbone(small(coverage_patience=0))
    seen = backbone.open(1, endless(1), 6)
    backbone.step(fails=poisoned_by(1, is_for_want_of_holders=True))
    assert seen.end == "failed"


def test_what_a_failed_ubatch_took_from_the_cache_is_decoded_again() -> None:
    """A model with recurrent states loses the whole sequence."""
    backbone = ToyBackbone(small())
    seen = {name: backbone.open(name, endless(name), 8) for name in (1, 2)}
    for _ in range(4):
        backbone.step()

    def fails(decode: Decode) -> DecodeFailed | None:
        for place in decode.places:
            backbone.caches[0].sequences[place.sequence].clear()
        return DecodeFailed("", "", (), is_aborted=True)

    backbone.step(fails=fails)
    assert lengths(backbone.decodes[-1])[1] > 1, "all of it again"
    backbone.run()
    for name, each in seen.items():
        assert (each.tokens, each.end) == alone(endless(name), 8, 64)


def test_what_went_through_of_a_failed_ubatch_is_not_decoded_twice() -> None:
    """llama.cpp cuts some batches into several, and the first of them may have been well."""
    backbone = ToyBackbone(small())
    seen = {name: backbone.open(name, endless(name), 8) for name in (1, 2)}
    seen[3] = backbone.open(3, range(1, 13), 2)
    backbone.step()
    for n_left in (1, 100, 2):
        backbone.step(fails=lambda _: DecodeFailed("", "", (), is_aborted=True), n_left=n_left)
        backbone.step()
    backbone.run()
    for name, each in seen.items():
        opened = backbone.opened[named(name)]
        assert (each.tokens, each.end) == alone(opened.tokens, opened.n_tokens, 64)


# -- prefixes ------------------------------------------------------------------------------------------------


def test_a_session_that_begins_alike_begins_with_what_is_kept() -> None:
    backbone = ToyBackbone(small(n_cells=256, kept_prefixes=2, reused_tokens_min=8))
    first = backbone.open(1, range(1, 41), 4)
    backbone.run()
    second = backbone.open(2, [*range(1, 31), 90, 91], 4)
    assert any(isinstance(each, CopySequence) and each.n_tokens == 30 for each in backbone.decodes[-1].steps)
    assert len(backbone.decodes[-1].places) == 2
    backbone.run()
    assert (first.tokens, first.end) == alone(range(1, 41), 4, 256)
    assert (second.tokens, second.end) == alone([*range(1, 31), 90, 91], 4, 256)


def test_the_same_prompt_again_decodes_its_last_token() -> None:
    backbone = ToyBackbone(small(n_cells=256, kept_prefixes=2, reused_tokens_min=8))
    backbone.open(1, range(1, 41), 1)
    backbone.run()
    again = backbone.open(2, range(1, 41), 1)
    assert [each.position for each in backbone.decodes[-1].places] == [39]
    backbone.run()
    assert again.tokens == alone(range(1, 41), 1, 256)[0]


def test_a_running_session_of_the_same_client_is_begun_with_too() -> None:
    backbone = ToyBackbone(small(n_cells=256, kept_prefixes=1, reused_tokens_min=8))
    backbone.open(1, range(1, 41), 30)
    for _ in range(4):
        backbone.step()
    second = backbone.open(2, [*range(1, 31), 90], 4)
    backbone.step()
    assert lengths(backbone.decodes[-1])[2] == 1
    backbone.run()
    assert second.tokens == alone([*range(1, 31), 90], 4, 256)[0]


def test_nobody_begins_with_what_another_client_said() -> None:
    """Else it could be told from the time of an answer whether somebody had said the same."""
    backbone = ToyBackbone(small(n_cells=256, kept_prefixes=2, reused_tokens_min=8))
    backbone.open(1, range(1, 41), 4, client="a")
    backbone.run()
    backbone.open(2, range(1, 41), 4, client="b")
    assert not any(isinstance(each, CopySequence) for each in backbone.decodes[-1].steps)


def test_what_is_kept_goes_for_whoever_needs_its_cells() -> None:
    backbone = ToyBackbone(small(kept_prefixes=4, reused_tokens_min=4))
    for name in range(1, 5):
        backbone.open(name, range(name * 20, name * 20 + 12), 1)
        backbone.run()
    assert backbone.core.cells(0).n_kept == 48
    seen = backbone.open(9, range(300, 330), 20)
    backbone.run()
    assert (seen.tokens, seen.end) == alone(range(300, 330), 20, 64)


# -- everything at once --------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    n_contexts=st.integers(1, 3),
    n_cells=st.integers(16, 96),
    n_ubatch=st.integers(4, 24),
    per_context=st.integers(1, 4),
    kept=st.integers(0, 3),
    chunk=st.integers(1, 8),
    faults=st.booleans(),
)
def test_sessions_get_what_they_would_get_alone(
    seed: int,
    n_contexts: int,
    n_cells: int,
    n_ubatch: int,
    per_context: int,
    kept: int,
    chunk: int,
    faults: bool,
) -> None:
    """Whatever comes, goes, fails and is cancelled: no cell twice, nobody for ever, no other token."""
    draws = random.Random(seed)
    backbone = ToyBackbone(
        small(
            n_contexts=n_contexts,
            n_cells=n_cells,
            n_ubatch=n_ubatch,
            sessions_per_context=per_context,
            kept_prefixes=kept,
            prefill_chunk=chunk,
            reused_tokens_min=3,
            waiting_max=12,
            waiting_per_client_max=6,
            coverage_patience=0,
        )
    )
    poisoned: set[SessionId] = set()
    names = 0

    def fails(decode: Decode) -> DecodeFailed | None:
        if decode.context in backbone.aborts and draws.random() < 0.5:
            return DecodeFailed("aborted", "", (), is_aborted=True)
        hit = {each.session for each in decode.places} & poisoned
        if hit:
            shown = frozenset(hit) if draws.random() < 0.5 else frozenset()
            return DecodeFailed("engine_failed", "", (), shown)
        return None

    for _ in range(120):
        backbone.aborts.clear()
        what = draws.random()
        if what < 0.3:
            names += 1
            start = draws.choice((0, 100, 100, 200))
            prompt = [start + each for each in range(1, draws.randint(2, n_cells + 4))]
            backbone.open(names, prompt, draws.randint(1, 30), client=draws.choice("abc"))
            if faults and draws.random() < 0.1:
                poisoned.add(named(names))
        elif what < 0.36 and names:
            backbone.cancel(draws.randint(1, names))
        elif what < 0.4:
            backbone.tick(backbone.now + seconds(1))
        elif backbone.decoding:
            backbone.step(
                draws.choice(sorted(backbone.decoding)), fails=fails, n_left=draws.choice((0, 0, 1, 100))
            )
    n_left = 0
    while backbone.decoding:
        backbone.step(draws.choice(sorted(backbone.decoding)), fails=fails)
        n_left += 1
        assert n_left < 20_000
    assert backbone.core.n_sessions == backbone.core.n_waiting == 0, "somebody is left over"
    assert backbone.core.next_deadline() is None
    assert all(backbone.core.cells(each).n_promised == 0 for each in range(n_contexts))
    for session, seen in backbone.seen.items():
        opened = backbone.opened[session]
        expected, reason = alone(opened.tokens, opened.n_tokens, n_cells) if opened.tokens else ([], "")
        assert seen.end, "a session that nobody ended"
        assert seen.tokens == expected[: len(seen.tokens)]
        if seen.end in ("length", "end_of_text"):
            assert (seen.tokens, seen.end) == (expected, reason)
        assert (seen.end == "failed") == (session in poisoned and seen.end not in ("refused", "cancelled"))


def test_options_that_make_no_sense_are_refused() -> None:
    for changes in ({"n_cells": 1}, {"n_ubatch": 3}, {"prefill_chunk": 0}, {"n_contexts": 0}):
        with pytest.raises(LocalProtocolError):
            small(**changes)
    assert isinstance(small(), SessionOptions)


@pytest.mark.parametrize(
    "memory, cell, contexts, wanted, cells",
    [(1000, 10, 1, 64, 64), (1000, 10, 2, 64, 50), (1000, 10, 1, 200, 100), (5, 10, 1, 64, 0)],
)
def test_contexts_are_as_large_as_the_memory_allows(
    memory: int, cell: int, contexts: int, wanted: int, cells: int
) -> None:
    assert cells_within(memory, cell, contexts, wanted) == cells
