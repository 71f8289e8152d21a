"""The fuzzed functions in the ordinary tests: every seed, what was once found, and that a finding is seen."""

from __future__ import annotations

from collections.abc import Callable

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto import codec
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.manifest import ModelManifest
from kvasir_proto.program import PROGRAM_VERSION, decode_program
from tests.fuzz import targets
from tests.fuzz.mutation import mutate_document
from tests.fuzz.targets import TARGETS, Finding
from tests.proto.declared import FAMILIES


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_and_every_cut_of_one_goes_through(name: str) -> None:
    target = TARGETS[name]
    seeds = list(target.seeds())
    assert seeds
    for seed in seeds:
        assert len(seed) <= target.size_bytes_max
        target.run(seed)
        for length in range(0, len(seed), 1 + len(seed) // 16):
            target.run(seed[:length])


@pytest.mark.parametrize(
    "document, decode",
    [
        (["kvasir/model-manifest", b"x" * 4000, *[0] * 16], ModelManifest.decode),
        (["kvasir/model-manifest", ["y" * 4000], *[0] * 16], ModelManifest.decode),
        (["kvasir/expert-program", "x" * 1500, False, []], decode_program),
        (
            ["kvasir/expert-program", PROGRAM_VERSION, False, [[1, 0, -1, "x" * 1500, bytes(16)]]],
            decode_program,
        ),
    ],
)
def test_found_a_refusal_does_not_quote_at_length(
    document: list[object], decode: Callable[[bytes], object]
) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode(msgpack.packb(document))
    assert len(str(raised.value)) < 200


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_a_changed_document_is_a_document_and_noise_is_left_alone(data: bytes, seed: int) -> None:
    changed = mutate_document(data, seed)
    assert changed == mutate_document(data, seed)
    if changed is not None:
        msgpack.unpackb(changed, strict_map_key=False)


def test_changes_reach_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most changes of a message are refused for a value, not for being no msgpack."""
    seed_input = next(iter(TARGETS["codec"].seeds()))
    codes: list[str] = []
    for seed in range(200):
        changed = mutate_document(seed_input[1:], seed)
        if changed is None:
            continue
        try:
            codec.decode(changed, FAMILIES[seed_input[0]])
        except RemoteProtocolError as error:
            codes.append(error.code)
    assert {"wrong_type", "out_of_bounds", "missing_field", "unknown_kind"} <= set(codes)
    assert codes.count("malformed") < 20


def test_what_breaks_a_promise_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numpy.isnan", lambda rows: np.zeros(rows.shape, bool))
    with pytest.raises(Finding, match="not finite"):
        list(map(TARGETS["rows"].run, TARGETS["rows"].seeds()))
    monkeypatch.setattr(targets, "REFUSAL_LENGTH_MAX", 3)
    with pytest.raises(Finding, match="a refusal of"):
        TARGETS["program"].run(b"\0")
