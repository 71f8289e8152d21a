"""A swarm is founded by one key, once, and its name is the digest of what that key signed."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import ModelDigest, SwarmDigest
from kvasir_proto.signing import SIGNED, sign
from kvasir_proto.swarm_manifest import (
    AUDITORS_MAX,
    SwarmManifest,
    Thresholds,
    open_swarm_manifest,
    sign_swarm_manifest,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
MANIFEST = SwarmManifest(
    model_digest=ModelDigest(bytes(32)),
    model_name="demo",
    reference_class="Q8_0",
    thresholds=Thresholds(),
    admission="open",
    compact_activations=False,
    partial_sums=False,
    founder_public_key=KEY.public_key().public_bytes_raw(),
    recovery_public_key=OTHER_KEY.public_key().public_bytes_raw(),
)
SIGNED_MANIFEST = sign_swarm_manifest(MANIFEST, KEY)


def _refused(data: bytes, expected: SwarmDigest | None = None) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        open_swarm_manifest(data, expected)
    return caught.value.code


def test_manifest_comes_back_with_the_name_of_its_swarm() -> None:
    manifest, digest = open_swarm_manifest(SIGNED_MANIFEST)
    assert manifest == MANIFEST
    assert digest == hashlib.sha256(decode(SIGNED_MANIFEST, SIGNED).payload).digest()
    assert open_swarm_manifest(SIGNED_MANIFEST, digest).digest == digest


def test_swarms_that_differ_anywhere_have_different_names() -> None:
    names = {
        open_swarm_manifest(sign_swarm_manifest(each, KEY)).digest
        for each in (
            MANIFEST,
            dataclasses.replace(MANIFEST, model_digest=ModelDigest(bytes([1]) * 32)),
            dataclasses.replace(MANIFEST, admission="invite"),
            dataclasses.replace(MANIFEST, thresholds=Thresholds(mean_kld_max=2e-3)),
            dataclasses.replace(MANIFEST, recovery_public_key=bytes(32)),
            dataclasses.replace(MANIFEST, electorate="open"),
            dataclasses.replace(MANIFEST, certificates="verified"),
            dataclasses.replace(MANIFEST, auditor_public_keys=(bytes(32),)),
        )
    }
    assert len(names) == 8


def test_manifest_names_a_bounded_number_of_auditors() -> None:
    keys = tuple(bytes([number]) * 32 for number in range(AUDITORS_MAX + 1))
    named = dataclasses.replace(MANIFEST, auditor_public_keys=keys[:AUDITORS_MAX])
    assert open_swarm_manifest(sign_swarm_manifest(named, KEY)).manifest == named
    with pytest.raises(LocalProtocolError, match="auditor_public_keys"):
        sign_swarm_manifest(dataclasses.replace(named, auditor_public_keys=keys), KEY)


def test_manifest_of_another_swarm_is_refused() -> None:
    assert _refused(SIGNED_MANIFEST, SwarmDigest(bytes(32))) == "wrong_swarm"


def test_only_the_founder_founds() -> None:
    with pytest.raises(LocalProtocolError, match="founder"):
        sign_swarm_manifest(MANIFEST, OTHER_KEY)
    payload = encode(MANIFEST)
    digest = SwarmDigest(hashlib.sha256(payload).digest())
    assert _refused(encode(sign(OTHER_KEY, SwarmManifest.kind, digest, payload))) == "wrong_founder"


def test_signature_over_another_digest_is_refused() -> None:
    payload = encode(MANIFEST)
    assert _refused(encode(sign(KEY, SwarmManifest.kind, SwarmDigest(bytes(32)), payload))) == "bad_signature"
