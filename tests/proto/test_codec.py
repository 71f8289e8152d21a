"""Identity both ways, nothing but `RemoteProtocolError` for anything else, and bounds on both sides."""

from __future__ import annotations

import dataclasses
import tracemalloc
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import node_id_of
from kvasir_proto.limits import CONTEXT_LENGTH_MAX, Length, Range
from kvasir_proto.messages import Family
from kvasir_proto.messages.engine import ENGINE, HolderConnected
from kvasir_proto.messages.local import LOCAL, GenerateRequest, StatusRequest
from kvasir_proto.messages.swarm import SWARM, Hello, Refusal
from kvasir_proto.sampling import Sampling
from tests.proto.declared import FAMILIES, MEMBER_IDS, MEMBERS, example_of, values_of

REQUEST = GenerateRequest("once", (), 4, Sampling(1, 0.5, 40, 0.9, 0.05))


def _refused(data: bytes, family: Family[Any]) -> RemoteProtocolError:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data, family)
    return caught.value


def _document(message: Any, **changes: Any) -> dict[str, Any]:
    document: dict[str, Any] = msgpack.unpackb(encode(message))
    return document | changes


# --- identity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
@settings(max_examples=40)  # for each of some fifty messages
@given(data=st.data())
def test_decode_after_encode_is_identity(family: Family[Any], member: type[Any], data: st.DataObject) -> None:
    message = data.draw(values_of(member))
    assert decode(encode(message), family) == message


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
def test_encoding_is_canonical(family: Family[Any], member: type[Any]) -> None:
    data = encode(example_of(member))
    assert data == encode(decode(data, family))
    names = [field.name for field in dataclasses.fields(member)]
    assert list(msgpack.unpackb(data)) == ["v", "kind", *names]


def test_whole_number_may_be_given_for_a_float() -> None:
    request = dataclasses.replace(REQUEST, sampling=Sampling(temperature=1))
    assert decode(encode(request), LOCAL) == request
    assert type(msgpack.unpackb(encode(request))["sampling"]["temperature"]) is float


# --- arbitrary input ----------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.binary(max_size=40)
)
STRUCTURES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abckv", max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


CODES = {
    "oversize",
    "malformed",
    "unsupported_version",
    "unknown_kind",
    "missing_field",
    "wrong_type",
    "out_of_bounds",
}


def _decode_or_refuse(data: bytes, family: Family[Any]) -> None:
    try:
        message = decode(data, family)
    except RemoteProtocolError as refusal:
        code, reason = refusal.code, refusal.reason
    else:
        assert decode(encode(message), family) == message
        return
    assert code in CODES
    assert len(reason) < 300


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_message_or_a_refusal(data: bytes) -> None:
    for family in FAMILIES:
        _decode_or_refuse(data, family)


@given(STRUCTURES)
def test_arbitrary_structures_give_a_message_or_a_refusal(structure: Any) -> None:
    for family in FAMILIES:
        _decode_or_refuse(msgpack.packb(structure), family)


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
@settings(max_examples=40)  # for each of some fifty messages
@given(data=st.data())
def test_arbitrary_fields_give_a_message_or_a_refusal(
    family: Family[Any], member: type[Any], data: st.DataObject
) -> None:
    document = _document(example_of(member))
    for name in data.draw(st.sets(st.sampled_from(sorted(document)), min_size=1)):
        document[name] = data.draw(STRUCTURES)
    _decode_or_refuse(msgpack.packb(document), family)


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
@settings(max_examples=40)  # for each of some fifty messages
@given(data=st.data())
def test_mutated_messages_give_a_message_or_a_refusal(
    family: Family[Any], member: type[Any], data: st.DataObject
) -> None:
    mutated = bytearray(encode(example_of(member)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(mutated)))
        end = min(len(mutated), start + data.draw(st.integers(0, 3)))
        mutated[start:end] = data.draw(st.binary(max_size=3))
    _decode_or_refuse(bytes(mutated), family)


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
def test_every_cut_and_every_addition_is_refused(family: Family[Any], member: type[Any]) -> None:
    data = encode(example_of(member))
    for size in range(len(data)):
        assert _refused(data[:size], family).code == "malformed"
    assert _refused(data + b"\xc0", family).code == "malformed"


def test_nested_claims_do_not_cost_memory() -> None:
    bomb = b"\xdd\xff\xff\xff\xff" * 100_000
    deep = b"\x91" * 500_000
    lists = b"\xdc\x10\x00" * 400_000
    tracemalloc.start()
    try:
        for data in (bomb, deep, lists):
            assert _refused(data, SWARM).code == "malformed"
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


# --- each refusal -------------------------------------------------------------------------------------------


def test_message_of_another_family_is_unknown() -> None:
    assert _refused(encode(StatusRequest()), SWARM).code == "unknown_kind"
    assert _refused(encode(Hello((1,), "0.1")), LOCAL).code == "unknown_kind"


@pytest.mark.parametrize("kind", [None, 1, "no_such_kind", b"hello", ["hello"]])
def test_unknown_kinds_are_refused(kind: Any) -> None:
    document = _document(Hello((1,), "0.1"), kind=kind)
    assert _refused(msgpack.packb(document), SWARM).code == "unknown_kind"


@pytest.mark.parametrize("version", [None, 0, 2, 1.0, True, "1"])
def test_other_versions_are_refused(version: Any) -> None:
    document = _document(Hello((1,), "0.1"), v=version)
    assert _refused(msgpack.packb(document), SWARM).code == "unsupported_version"


def test_message_over_the_limit_of_its_family_is_refused_unread() -> None:
    assert _refused(bytes(SWARM.size_bytes_max + 1), SWARM).code == "oversize"


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
def test_each_missing_field_is_named(family: Family[Any], member: type[Any]) -> None:
    for field in dataclasses.fields(member):
        document = _document(example_of(member))
        del document[field.name]
        error = _refused(msgpack.packb(document), family)
        assert error.code == "missing_field"
        assert field.name in error.reason


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
def test_no_field_takes_a_map_with_nothing_in_it(family: Family[Any], member: type[Any]) -> None:
    for field in dataclasses.fields(member):
        error = _refused(msgpack.packb(_document(example_of(member), **{field.name: {}})), family)
        assert error.code in ("wrong_type", "missing_field")
        assert field.name in error.reason


def test_unknown_fields_are_ignored() -> None:
    hello = Hello((1,), "0.1")
    data = msgpack.packb(_document(hello, mood=["calm", {"for": 3}]))
    assert decode(data, SWARM) == hello


@pytest.mark.parametrize("family, member", MEMBERS, ids=MEMBER_IDS)
def test_every_message_may_grow(family: Family[Any], member: type[Any]) -> None:
    message = example_of(member)
    later = {"later": [0] * 256} | {f"later_{number}": {"a": 1} for number in range(31)}
    assert decode(msgpack.packb(_document(message, **later)), family) == message


def test_unknown_fields_of_nested_records_are_ignored() -> None:
    for family, member in MEMBERS:
        if member.kind == "term_proof":
            proof = example_of(member)
            document = _document(proof)
            document["electorate"]["later"] = 1
            assert decode(msgpack.packb(document), family) == proof
            return
    raise AssertionError("no nested message left to try")


def test_one_key_twice_is_refused() -> None:
    data = encode(Refusal("busy", ""))
    pair = msgpack.packb("code") + msgpack.packb("gone")
    assert data[0] == 0x84
    assert _refused(b"\x85" + data[1:] + pair, SWARM).code == "malformed"


def test_extension_types_are_refused() -> None:
    document = _document(Refusal("busy", ""), later=msgpack.ExtType(5, b"x"))
    assert _refused(msgpack.packb(document), SWARM).code == "malformed"


@pytest.mark.parametrize(
    "name, value, code",
    [
        ("seed", True, "wrong_type"),
        ("seed", 1.0, "wrong_type"),
        ("seed", -1, "out_of_bounds"),
        ("n_tokens", 0, "out_of_bounds"),
        ("n_tokens", CONTEXT_LENGTH_MAX + 1, "out_of_bounds"),
        ("temperature", 1, "wrong_type"),
        ("temperature", float("nan"), "out_of_bounds"),
        ("temperature", float("inf"), "out_of_bounds"),
        ("temperature", -0.5, "out_of_bounds"),
        ("top_p", 1.5, "out_of_bounds"),
        ("prompt", b"once", "wrong_type"),
        ("token_ids", None, "wrong_type"),
        ("token_ids", [1, "2"], "wrong_type"),
        ("token_ids", [-1], "out_of_bounds"),
    ],
)
def test_values_outside_their_declaration_are_refused(name: str, value: Any, code: str) -> None:
    document = _document(REQUEST)
    (document["sampling"] if name in document["sampling"] else document)[name] = value
    error = _refused(msgpack.packb(document), LOCAL)
    assert error.code == code
    assert name in error.reason


def test_node_ids_are_checked_not_only_measured() -> None:
    node_id = node_id_of(bytes(32))
    other = node_id[:-1] + ("0" if node_id[-1] != "0" else "1")
    data = encode(HolderConnected(node_id)).replace(node_id.encode(), other.encode())
    assert _refused(data, ENGINE).code == "out_of_bounds"


# --- our own side -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"n_tokens": 0},
        {"sampling": Sampling(seed=True)},
        {"sampling": Sampling(seed=1 << 64)},
        {"sampling": Sampling(temperature=float("nan"))},
        {"sampling": Sampling(temperature=1 << 60)},
        {"token_ids": [1, 2]},
        {"prompt": "\ud800"},
        {"prompt": 3},
    ],
    ids=str,
)
def test_what_others_would_refuse_is_not_sent(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="generate_request"):
        encode(dataclasses.replace(REQUEST, **changes))


@dataclass(frozen=True, slots=True)
class _Bounded:
    kind: ClassVar[str] = "bounded"
    numbers: Annotated[tuple[Annotated[int, Range(0, 9)], ...], Length(2, 3)]


BOUNDED = Family("bounded", (_Bounded,), 100)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_sequences_have_a_least_and_a_greatest_length(count: int) -> None:
    data = msgpack.packb({"v": 1, "kind": "bounded", "numbers": [1] * count})
    if count in (2, 3):
        assert decode(data, BOUNDED) == _Bounded((1,) * count)
    else:
        assert _refused(data, BOUNDED).code in ("out_of_bounds", "malformed")
        with pytest.raises(LocalProtocolError, match="numbers"):
            encode(_Bounded((1,) * count))


@dataclass(frozen=True, slots=True)
class _Paired:
    kind: ClassVar[str] = "paired"
    pairs: Annotated[
        tuple[tuple[Annotated[int, Range(0, 9)], Annotated[str, Length(1, 2)]], ...], Length(0, 3)
    ]


PAIRED = Family("paired", (_Paired,), 100)


@pytest.mark.parametrize(
    "pairs, is_fit",
    [
        ([], True),
        ([[1, "a"], [9, "ab"]], True),
        ([[1]], False),
        ([[1, "a", "b"]], False),
        ([["a", 1]], False),
        ([[10, "a"]], False),
        ([1], False),
    ],
)
def test_rows_have_a_kind_and_a_bound_for_each_item(pairs: list[Any], is_fit: bool) -> None:
    data = msgpack.packb({"v": 1, "kind": "paired", "pairs": pairs})
    message = _Paired(tuple(tuple(each) if isinstance(each, list) else each for each in pairs))
    if is_fit:
        assert decode(data, PAIRED) == decode(encode(message), PAIRED) == message
    else:
        assert _refused(data, PAIRED).code in ("out_of_bounds", "wrong_type")
        with pytest.raises(LocalProtocolError, match="pairs"):
            encode(message)


@pytest.mark.parametrize(
    "annotation",
    [
        int,
        str,
        bytes,
        float,
        tuple[int, ...],
        tuple[int, str],
        Annotated[int, Length(0, 1)],
        list[int],
        dict[str, int],
        Any,
    ],
    ids=str,
)
def test_fields_without_a_bound_are_not_compiled(annotation: Any) -> None:
    message_type = dataclasses.make_dataclass("Unbounded", [("field", annotation)], frozen=True)
    message_type.kind = "unbounded"  # type: ignore[attr-defined]  # made on the spot
    with pytest.raises(TypeError, match=r"Unbounded\.field"):
        encode(message_type(1))


def test_two_messages_of_a_family_cannot_have_one_kind() -> None:
    with pytest.raises(ValueError, match="one kind"):
        Family("double", (_Bounded, _Bounded), 100)
