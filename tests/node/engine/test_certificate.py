"""An engine's certificate proves whose engine it is, in which role and swarm; nothing else passes for it."""

from __future__ import annotations

import datetime
from random import Random

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.engine.certificate import EngineKey, public_der, verify_engine_certificate
from kvasir_proto.certificate import ENGINE_EXTENSION_OID, EngineBinding, bind_engine
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import SwarmDigest, node_id_of

NODE_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NODE = node_id_of(NODE_KEY.public_key().public_bytes_raw())
OTHER_KEY = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
OTHER_NODE = node_id_of(OTHER_KEY.public_key().public_bytes_raw())
SWARM = SwarmDigest(b"s" * 32)
KEY = EngineKey(ec.derive_private_key(20261129, ec.SECP256R1()))
BINDING = bind_engine(NODE_KEY, SWARM, KEY.public_der, "worker", 3)


def der_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.DER)


GOOD = der_of(KEY.certificate(BINDING))


def code_of(certificate: bytes, *, swarm: SwarmDigest = SWARM, role: str = "worker") -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        verify_engine_certificate(certificate, swarm, NODE, role)  # type: ignore[arg-type]
    return caught.value.code


def built(
    key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey,
    extensions: list[x509.ExtensionType],
) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return der_of(builder.sign(key, digest))


def our_extension(binding: bytes) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(ENGINE_EXTENSION_OID), binding)


def test_a_certificate_tells_whose_engine_it_is() -> None:
    binding = verify_engine_certificate(GOOD, SWARM, NODE, "worker")
    assert isinstance(binding, EngineBinding)
    assert (binding.node_id, binding.role, binding.generation) == (NODE, "worker", 3)


def test_its_dates_are_wide_because_clocks_differ() -> None:
    certificate = x509.load_der_x509_certificate(GOOD)
    assert certificate.not_valid_before_utc.year <= 1971
    assert certificate.not_valid_after_utc.year >= 2900
    certificate.verify_directly_issued_by(certificate)


def test_the_extension_is_ours_and_not_critical() -> None:
    extension = x509.load_der_x509_certificate(GOOD).extensions.get_extension_for_oid(
        x509.ObjectIdentifier(ENGINE_EXTENSION_OID)
    )
    assert not extension.critical
    assert b"1.3.6.1.4.1.53594" not in GOOD  # libp2p's own, by which an engine could pose as the node
    assert "53594" not in ENGINE_EXTENSION_OID


def test_keys_are_fresh_and_written_as_ssl_reads_them() -> None:
    first, second = EngineKey.generate(), EngineKey.generate()
    assert first.public_der != second.public_der
    loaded = load_pem_private_key(first.private_pem, None)
    assert public_der(loaded.public_key()) == first.public_der


def test_another_node_role_swarm_or_key_is_refused() -> None:
    assert code_of(GOOD, role="backbone") == "wrong_role"
    assert code_of(GOOD, swarm=SwarmDigest(b"t" * 32)) == "bad_signature"
    with pytest.raises(RemoteProtocolError) as caught:
        verify_engine_certificate(GOOD, SWARM, OTHER_NODE, "worker")
    assert caught.value.code == "wrong_node"
    stolen = der_of(EngineKey.generate().certificate(BINDING))
    assert code_of(stolen) == "wrong_engine"
    signed_by_another = bind_engine(OTHER_KEY, SWARM, KEY.public_der, "worker", 3)
    assert code_of(der_of(KEY.certificate(signed_by_another))) == "wrong_node"


def test_a_key_of_another_kind_is_refused() -> None:
    ed25519_key = ed25519.Ed25519PrivateKey.generate()
    assert code_of(built(ed25519_key, [our_extension(BINDING)])) == "wrong_engine"
    with pytest.raises(RemoteProtocolError):
        public_der(ed25519_key.public_key())
    with pytest.raises(RemoteProtocolError):
        public_der("not even a key")


@pytest.mark.parametrize(
    "extensions",
    [
        [],
        [x509.BasicConstraints(ca=True, path_length=0)],
        [x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.58888.1.2"), BINDING)],
    ],
)
def test_a_certificate_without_the_extension_is_refused(extensions: list[x509.ExtensionType]) -> None:
    assert code_of(built(KEY.private_key, extensions)) == "malformed"


@pytest.mark.parametrize("binding", [b"", b"\xc1", BINDING[:-1], BINDING + b"\0"])
def test_an_extension_with_something_else_in_it_is_refused(binding: bytes) -> None:
    assert code_of(built(KEY.private_key, [our_extension(binding)]))


def test_the_extension_twice_is_refused() -> None:
    """The builder refuses to make one, so the second is written over another extension's object id."""
    stand_in = "1.3.6.1.4.1.58888.1.2"
    twice = built(
        KEY.private_key,
        [our_extension(BINDING), x509.UnrecognizedExtension(x509.ObjectIdentifier(stand_in), BINDING)],
    )
    oid = bytes.fromhex("060a2b060104") + b"\x01\x83\xcc\x08\x01"
    assert twice.count(oid[6:]) == 2
    assert code_of(twice.replace(oid[6:] + b"\x02", oid[6:] + b"\x01")) == "malformed"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_certificate(data: bytes) -> None:
    assert code_of(data) == "malformed"


def test_a_damaged_certificate_is_refused_and_never_a_crash() -> None:
    """Whatever ``cryptography`` makes of it: versions, curves and names that do not exist among them."""
    draws = Random(6)
    accepted = 0
    for _ in range(1500):
        data = bytearray(GOOD)
        for _ in range(draws.choice([1, 1, 2, 5])):
            data[draws.randrange(len(data))] = draws.randrange(256)
        try:
            verify_engine_certificate(bytes(data), SWARM, NODE, "worker")
        except RemoteProtocolError:
            continue
        accepted += 1
        # What is left unread: the certificate's own signature, its names, dates and number.
        certificate = x509.load_der_x509_certificate(bytes(data))
        assert public_der(certificate.public_key()) == KEY.public_der
    assert accepted < 1500


@pytest.mark.parametrize("cut", range(0, len(GOOD), 7))
def test_a_certificate_cut_short_is_refused(cut: int) -> None:
    assert code_of(GOOD[:cut]) == "malformed"
