"""A node's name and its key are one thing in two spellings, and the name has one spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import is_node_id, node_id_of, public_key_of

# Written in libp2p's own documents, so not of our making.
KNOWN_IDS = (
    "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA",
    "12D3KooWGC6TvWhfapngX6wvJHMYvKpDMXPb3ZnCZ6dMoaMtimQ5",
)
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"

keys = st.binary(min_size=32, max_size=32)


def _base58_by_long_division(data: bytes) -> str:
    """Base58 as its first description has it: digit by digit over a list of bytes."""
    digits: list[int] = []
    for byte in data:
        carry = byte
        for place, digit in enumerate(digits):
            carry += digit << 8
            digits[place] = carry % 58
            carry //= 58
        while carry:
            digits.append(carry % 58)
            carry //= 58
    zeros = len(data) - len(data.lstrip(b"\x00"))
    return "1" * zeros + "".join(ALPHABET[digit] for digit in reversed(digits))


@given(keys)
def test_key_comes_back_from_the_name(key: bytes) -> None:
    assert public_key_of(node_id_of(key)) == key


@given(keys)
def test_name_is_base58_of_an_identity_multihash_of_the_protobuf_key(key: bytes) -> None:
    assert node_id_of(key) == _base58_by_long_division(bytes([0, 36, 8, 1, 18, 32]) + key)


@pytest.mark.parametrize("node_id", KNOWN_IDS)
def test_names_from_elsewhere_are_understood(node_id: str) -> None:
    assert node_id_of(public_key_of(node_id)) == node_id


@given(st.text(ALPHABET, min_size=51, max_size=53) | st.text(max_size=60))
def test_arbitrary_text_is_a_name_or_refused(text: str) -> None:
    try:
        key = public_key_of(text)
    except RemoteProtocolError as refusal:
        code = refusal.code
    else:
        assert node_id_of(key) == text
        return
    assert code == "bad_node_id"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1" * 52,
        "z" * 52,
        "1" + "z" * 51,
        KNOWN_IDS[0][:-1],
        KNOWN_IDS[0] + "1",
        "1" + KNOWN_IDS[0][:-1],
        "2" + KNOWN_IDS[0][1:],
        KNOWN_IDS[0].replace("D", "0"),
        KNOWN_IDS[0].replace("D", "\N{FULLWIDTH LATIN CAPITAL LETTER D}"),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
def test_other_texts_are_not_names(text: str) -> None:
    assert not is_node_id(text)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_keys_have_32_bytes(size: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        node_id_of(bytes(size))
