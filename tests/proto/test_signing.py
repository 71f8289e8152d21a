"""A signature is good for one signer, one kind, one swarm and one payload, and for nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto import signing
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.limits import SIGNED_SIZE_MAX
from kvasir_proto.messages import Family
from kvasir_proto.messages.swarm import SWARM, Hello, Refusal
from kvasir_proto.signing import SIGNED, Signed, open_signed, sign, sign_message, signed_bytes, verify

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
SWARM_A = SwarmDigest(bytes(32))
SWARM_B = SwarmDigest(bytes([1]) * 32)


def _refused(signed: Signed, kind: str = "plan", swarm: SwarmDigest = SWARM_A) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        verify(signed, kind, swarm)
    return caught.value.code


@given(st.binary(min_size=1, max_size=100))
def test_what_is_signed_is_what_is_verified(payload: bytes) -> None:
    signed = decode(encode(sign(KEY, "plan", SWARM_A, payload)), SIGNED)
    assert verify(signed, "plan", SWARM_A) == payload
    assert signed.signer_id == node_id_of(KEY.public_key().public_bytes_raw())


def test_signature_is_good_for_nothing_else() -> None:
    signed = sign(KEY, "plan", SWARM_A, b"payload")
    other = sign(OTHER_KEY, "plan", SWARM_A, b"payload")
    assert _refused(signed, kind="vote") == "wrong_kind"
    assert _refused(dataclasses.replace(signed, payload_kind="vote"), kind="vote") == "bad_signature"
    assert _refused(signed, swarm=SWARM_B) == "bad_signature"
    assert _refused(dataclasses.replace(signed, payload=b"payloae")) == "bad_signature"
    assert _refused(dataclasses.replace(signed, signer=other.signer)) == "bad_signature"
    assert _refused(dataclasses.replace(signed, signature=other.signature)) == "bad_signature"


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=64, max_size=64))
def test_arbitrary_keys_and_signatures_are_refused(signer: bytes, signature: bytes) -> None:
    assert _refused(Signed("plan", b"payload", signer, signature)) == "bad_signature"


@given(st.text("ab", max_size=4), st.binary(max_size=4), st.text("ab", max_size=4), st.binary(max_size=4))
def test_different_things_have_different_signed_bytes(
    kind: str, payload: bytes, other_kind: str, other_payload: bytes
) -> None:
    same = (kind, payload) == (other_kind, other_payload)
    first = signed_bytes(kind, SWARM_A, payload)
    assert (first == signed_bytes(other_kind, SWARM_A, other_payload)) is same
    assert first.startswith(b"\x00\x00\x00\x08kvasir/1")


def test_signed_message_comes_back_with_its_signer() -> None:
    message = Refusal("busy", "going home")
    opened = open_signed(sign_message(KEY, SWARM_A, message), SWARM, SWARM_A)
    assert opened == (message, node_id_of(KEY.public_key().public_bytes_raw()))


def test_signed_message_must_be_of_the_family_and_of_the_kind_it_was_signed_as() -> None:
    only_refusals = Family("refusal", (Refusal,), 4096)
    with pytest.raises(RemoteProtocolError) as caught:
        open_signed(sign_message(KEY, SWARM_A, Hello((1,), "0.1")), only_refusals, SWARM_A)
    assert caught.value.code == "wrong_kind"
    disguised = encode(sign(KEY, "refusal", SWARM_A, encode(Hello((1,), "0.1"))))
    with pytest.raises(RemoteProtocolError) as caught:
        open_signed(disguised, SWARM, SWARM_A)
    assert caught.value.code == "wrong_kind"


@given(st.data())
def test_mutated_signed_messages_are_refused(data: st.DataObject) -> None:
    mutated = bytearray(sign_message(KEY, SWARM_A, Refusal("busy", "going home")))
    place = data.draw(st.integers(0, len(mutated) - 1))
    mutated[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RemoteProtocolError):
        open_signed(bytes(mutated), SWARM, SWARM_A)


def test_payload_too_large_to_be_signed_is_our_error() -> None:
    with pytest.raises(LocalProtocolError, match="payload"):
        encode(sign(KEY, "plan", SWARM_A, bytes(SIGNED_SIZE_MAX)))
    largest = encode(sign(KEY, "k" * 64, SWARM_A, bytes(SIGNED_SIZE_MAX - 512)))
    assert decode(largest, SIGNED).payload_kind == "k" * 64


def test_a_signature_is_checked_once_and_a_bad_one_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bytes] = []

    class CountedKey:
        def __init__(self, data: bytes) -> None:
            self._key = Ed25519PublicKey.from_public_bytes(data)

        from_public_bytes = classmethod(lambda cls, data: cls(data))

        def verify(self, signature: bytes, data: bytes) -> None:
            checked.append(data)
            self._key.verify(signature, data)

    monkeypatch.setattr(signing, "Ed25519PublicKey", CountedKey)
    monkeypatch.setattr(signing, "_good", {})
    monkeypatch.setattr(signing, "_GOOD_MAX", 3)
    signed = [sign(KEY, "vote", SWARM_A, bytes([number])) for number in range(5)]
    for _ in range(3):
        assert verify(signed[0], "vote", SWARM_A) == signed[0].payload
    assert len(checked) == 1
    bad = dataclasses.replace(signed[0], payload=b"else")
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            verify(bad, "vote", SWARM_A)
    assert len(checked) == 3
    for each in signed:
        verify(each, "vote", SWARM_A)
    assert len(signing._good) == 3
