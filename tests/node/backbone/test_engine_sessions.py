"""Sessions as control sees them: the demo model in one process, messages over a socket pair."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvasir_node.backbone.engine import BackboneEngine
from kvasir_node.engine.channel import ControlChannel
from kvasir_node.engine.lease import boottime_ns
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.model.store import DEMO_MODEL
from kvasir_proto.ids import SessionId
from kvasir_proto.messages.engine import (
    CancelSession,
    EvaluateLogits,
    Generate,
    LoadTrunk,
    LogitsEvaluated,
    SessionEnded,
    SessionOpened,
    SetLease,
    TokenEmitted,
    Tokenize,
    Tokenized,
    TrunkLoaded,
)
from kvasir_proto.sampling import Sampling, SamplingOptions

GREEDY = SamplingOptions(Sampling(temperature=0.0))
PROMPTS = ("Once upon a time", "The dog", "It was very cold and the snow fell on", "Tom said")
N_TOKENS = 12
PENALISED = SamplingOptions(Sampling(temperature=0.0), presence_penalty=0.7, frequency_penalty=0.4)
DRAWN = SamplingOptions(Sampling(seed=11, temperature=1.0), presence_penalty=0.7)
TOLERANCE = 0.05
"""Of log-probabilities where a prompt is computed in other shapes."""
NAMES = itertools.count(10_000)


def named(name: int) -> SessionId:
    return SessionId(name.to_bytes(16, "big"))


class Control:
    """The other end of the engine's socket pair."""

    def __init__(self, engine: BackboneEngine, channel: ControlChannel) -> None:
        self.engine, self.channel = engine, channel
        self.tokens: dict[SessionId, list[TokenEmitted]] = {}
        self.ends: dict[SessionId, SessionEnded] = {}
        self.opened: list[SessionId] = []

    def generate(self, name: int, prompt: str | None, n_tokens: int = N_TOKENS, **more: Any) -> None:
        token_ids, sampling = more.pop("token_ids", ()), more.pop("sampling", GREEDY)
        self.engine.handle(Generate(named(name), prompt, token_ids, n_tokens, sampling, 600_000, **more))

    def receive(self) -> Any:
        message = self.channel.receive()
        match message:
            case TokenEmitted(session):
                self.tokens.setdefault(session, []).append(message)
            case SessionOpened(session):
                self.opened.append(session)
            case SessionEnded(session):
                assert session not in self.ends
                self.ends[session] = message
        return message

    def wait(self, *names: int) -> None:
        while not all(named(each) in self.ends for each in names):
            assert self.receive() is not None

    def ids(self, name: int) -> list[int]:
        return [each.token for each in self.tokens.get(named(name), [])]


@contextlib.contextmanager
def controlled(directory: Path, n_sessions: int) -> Iterator[Control]:
    manifest = directory / "manifest"
    manifest.write_bytes(build_manifest(DEMO_MODEL).encode())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(120.0)
        engine = BackboneEngine(ControlChannel(theirs), cast(Any, None))
        control = Control(engine, ControlChannel(ours))
        engine.handle(SetLease(1, 5, boottime_ns() + 10**15))
        engine.handle(
            LoadTrunk(
                request=1,
                backbone_path=str(DEMO_MODEL),
                manifest_path=str(manifest),
                n_ctx=512,
                n_ubatch=64,
                threads=1,
                hooked=False,
                kv_type="f16",
                compact_activations=False,
                partial_sums=False,
                coverage_patience_ns=0,
                device="none",
                rpc=None,
                sessions=n_sessions,
            )
        )
        assert isinstance(control.receive(), TrunkLoaded)
        yield control
        engine.close()


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with controlled(tmp_path_factory.mktemp("engine"), 4) as control:
        yield control


@pytest.fixture(scope="module")
def alone(control: Control) -> list[list[int]]:
    """What each prompt gives when nothing else runs."""
    for name, prompt in enumerate(PROMPTS):
        control.generate(100 + name, prompt)
        control.wait(100 + name)
    return [control.ids(100 + name) for name in range(len(PROMPTS))]


def test_a_session_alone_gives_the_same_whatever_ran_before(control: Control, alone: list[list[int]]) -> None:
    for name, prompt in reversed(list(enumerate(PROMPTS))):
        control.generate(200 + name, prompt)
        control.wait(200 + name)
        assert control.ids(200 + name) == alone[name]
        ended = control.ends[named(200 + name)]
        assert ended.n_generated == len(alone[name])
        assert ended.n_prompt > 0
        assert ended.prompt_ns > 0
        assert ended.decode_ns > 0


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED, DRAWN], ids=["greedy", "penalised", "drawn"])
def test_a_session_that_is_gone_on_with_is_equivalent_to_one_that_never_stopped(
    control: Control, sampling: SamplingOptions
) -> None:
    """Wherever it was cut. Its prompt is computed in other shapes then, so where they part, it was close."""
    (prompt, *_), name = PROMPTS, next(NAMES)
    control.engine.handle(Tokenize(7, prompt))
    (tokenized,) = [each for each in (control.receive(),) if isinstance(each, Tokenized)]
    prompt_ids = tokenized.token_ids
    control.generate(name, None, 24, token_ids=prompt_ids, n_top=8, sampling=sampling)
    control.wait(name)
    whole = control.tokens[named(name)]
    assert len(whole) > 10
    n_parted = 0
    for n_emitted in range(1, len(whole)):
        name, before = next(NAMES), tuple(each.token for each in whole[:n_emitted])
        control.generate(
            name,
            None,
            24 - n_emitted,
            token_ids=(*prompt_ids, *before),
            n_emitted=n_emitted,
            n_top=8,
            sampling=sampling,
        )
        control.wait(name)
        again = control.tokens[named(name)]
        assert control.ends[named(name)].n_prompt == len(prompt_ids)
        for one, other in zip(whole[n_emitted:], again, strict=False):
            assert one.position == other.position
            if one.token != other.token:
                n_parted += 1
                break
            assert one.log_probability == pytest.approx(other.log_probability, abs=TOLERANCE)
        else:
            assert len(again) == len(whole) - n_emitted
            assert (again[-1].is_last, whole[-1].is_last) in ((True, True), (False, False))
    assert n_parted <= 1


@pytest.mark.parametrize("sampling", [PENALISED, DRAWN], ids=["penalised", "drawn"])
def test_with_one_session_in_a_context_going_on_is_identical_bit_for_bit(
    tmp_path: Path, sampling: SamplingOptions
) -> None:
    """Prompt and emitted tokens are computed in the shapes of the first time, wherever it was cut."""
    prompt = tuple(10 + index % 90 for index in range(70))  # more than one ubatch
    with controlled(tmp_path, 1) as control:
        whole = next(NAMES)
        control.generate(whole, None, 16, token_ids=prompt, n_top=8, sampling=sampling)
        control.wait(whole)
        for n_emitted in range(1, len(control.ids(whole))):
            rest, before = next(NAMES), tuple(control.ids(whole)[:n_emitted])
            control.generate(
                rest,
                None,
                16 - n_emitted,
                token_ids=(*prompt, *before),
                n_emitted=n_emitted,
                n_top=8,
                sampling=sampling,
            )
            control.wait(rest)
            expected = control.tokens[named(whole)][n_emitted:]
            assert [replace(each, session=named(whole)) for each in control.tokens[named(rest)]] == expected


def test_a_session_without_a_prompt_before_what_was_emitted_is_refused(control: Control) -> None:
    name = next(NAMES)
    control.generate(name, None, token_ids=(5, 6), n_emitted=2)
    control.wait(name)
    assert control.ends[named(name)].code == "usage_error"


def test_a_context_that_is_full_gives_one_token_more_to_who_goes_on(control: Control) -> None:
    """As it does to who was there all the time: the last token is computed, and none is asked for after."""
    prompt = tuple(10 + index % 50 for index in range(508))
    whole, rest = next(NAMES), next(NAMES)
    control.generate(whole, None, 20, token_ids=prompt)
    control.wait(whole)
    ids = control.ids(whole)
    assert len(ids) == 512 + 1 - 508
    control.generate(rest, None, 20 - 4, token_ids=(*prompt, *ids[:4]), n_emitted=4)
    control.wait(rest)
    assert control.ends[named(rest)].reason == control.ends[named(whole)].reason == "length"
    assert len(control.ids(rest)) == 1


def test_sessions_together_are_all_answered(control: Control, alone: list[list[int]]) -> None:
    for turn in range(3):  # more than decode together
        for name, prompt in enumerate(PROMPTS):
            control.generate(300 + 10 * turn + name, prompt)
    control.wait(*(300 + 10 * turn + name for turn in range(3) for name in range(len(PROMPTS))))
    for turn in range(3):
        for name, tokens in enumerate(alone):
            ids = control.ids(300 + 10 * turn + name)
            assert len(ids) > 0
            assert ids[0] == tokens[0]
    assert {named(300 + 10 * turn + name) for turn in range(3) for name in range(4)} <= set(control.opened)
    assert [each.is_last for each in control.tokens[named(300)]] == [False] * (N_TOKENS - 1) + [True]
    positions = [each.position for each in control.tokens[named(300)]]
    assert positions == list(range(positions[0], positions[0] + len(positions)))
    assert {(each.epoch, each.term) for each in control.tokens[named(300)]} == {(1, 5)}


def test_a_cancelled_session_ends_and_the_others_do_not(control: Control, alone: list[list[int]]) -> None:
    control.generate(400, PROMPTS[0], 400)
    control.generate(401, PROMPTS[1])
    while not control.ids(400):
        control.receive()
    control.engine.handle(CancelSession(named(400)))
    control.wait(400, 401)
    assert control.ends[named(400)].reason == "cancelled"
    assert control.ends[named(401)].reason in ("length", "end_of_text")
    control.generate(402, PROMPTS[2])
    control.engine.handle(CancelSession(named(402)))
    control.wait(402)
    assert control.ends[named(402)].reason in ("cancelled", "length")


def test_what_cannot_be_is_the_clients_mistake(control: Control) -> None:
    for name, token_ids in ((500, ()), (501, (1,) * 513), (502, (10**6,))):
        control.generate(name, None, token_ids=token_ids)
        control.wait(name)
        ended = control.ends[named(name)]
        assert (ended.reason, ended.code, ended.retry_after_ns) == ("failed", "usage_error", 0)

    control.generate(503, PROMPTS[0])  # all that is said of the others has come when this one ends
    control.wait(503)
    assert not {named(500), named(501), named(502)} & set(control.opened)


def test_an_end_token_and_log_probabilities_come_as_they_were_wanted(
    control: Control, alone: list[list[int]]
) -> None:
    end = alone[0][5]
    first = alone[0].index(end)
    control.generate(600, PROMPTS[0], end_tokens=(end,), n_top=3)
    control.wait(600)
    ended = control.ends[named(600)]
    assert control.ids(600) == alone[0][:first]
    assert (ended.reason, ended.end_token) == ("end_of_text", end)
    assert ended.end_top[0] == (end, ended.end_log_probability)
    for each in control.tokens[named(600)]:
        assert each.log_probability is not None
        assert each.top[0] == (each.token, each.log_probability), "greedy: the likeliest"
        assert [value for _, value in each.top] == sorted((value for _, value in each.top), reverse=True)


def test_an_evaluation_beside_a_session_changes_neither(
    control: Control, alone: list[list[int]], tmp_path: Path
) -> None:
    def evaluate(request: int) -> bytes:
        path = tmp_path / f"{request}.npy"
        control.engine.handle(EvaluateLogits(request, (5, 6, 7, 8), (3, 1), str(path)))
        while not isinstance(control.receive(), LogitsEvaluated):
            pass
        return path.read_bytes()

    before = evaluate(7)
    control.generate(700, PROMPTS[0])
    while not control.ids(700):
        control.receive()
    assert evaluate(8) == before
    control.wait(700)
    assert control.ids(700) == alone[0]
    assert evaluate(9) == before
