"""An engine's self-made X.509 certificate, which carries its node's signature in an extension of our own.

Dates are wide open because clocks differ between strangers' machines: what limits a certificate is the
one-time token, not the calendar. The extension is not critical, since OpenSSL refuses
critical extensions it does not know; it is our own check that demands it.
"""

from __future__ import annotations

import datetime
import warnings
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.oid import NameOID

from kvasir_proto.certificate import ENGINE_EXTENSION_OID, EngineBinding, verify_binding
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest
from kvasir_proto.limits import Role

_NOT_BEFORE = datetime.datetime(1971, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(2999, 12, 31, tzinfo=datetime.UTC)
_OID = x509.ObjectIdentifier(ENGINE_EXTENSION_OID)

_NOT_A_CERTIFICATE = (
    ValueError,
    CryptographyDeprecationWarning,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""What ``cryptography`` raises for bytes that somebody else made up."""


@dataclass(frozen=True, slots=True)
class EngineKey:
    """The P-256 key that an engine makes for itself at start and never writes down."""

    private_key: ec.EllipticCurvePrivateKey

    @classmethod
    def generate(cls) -> EngineKey:
        """A fresh key."""
        return cls(ec.generate_private_key(ec.SECP256R1()))

    @property
    def public_der(self) -> bytes:
        """SubjectPublicKeyInfo, as control signs it."""
        return public_der(self.private_key.public_key())

    @property
    def private_pem(self) -> bytes:
        """The private key as ``ssl`` wants to read it."""
        return self.private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def certificate(self, binding: bytes) -> x509.Certificate:
        """A self-signed certificate with the signed ``binding`` in it."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvasir engine")])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.private_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_NOT_BEFORE)
            .not_valid_after(_NOT_AFTER)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.UnrecognizedExtension(_OID, binding), critical=False)
            .sign(self.private_key, hashes.SHA256())
        )


def public_der(key: object) -> bytes:
    """SubjectPublicKeyInfo of a public key. Raises `RemoteProtocolError` for a kind we do not use."""
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise RemoteProtocolError("an engine's key is on an elliptic curve", code="wrong_engine")
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def verify_engine_certificate(
    certificate_der: bytes, swarm_digest: SwarmDigest, node_id: NodeId, role: Role
) -> EngineBinding:
    """The binding in a certificate, if node ``node_id`` made it for this key, role and swarm.

    Raises `RemoteProtocolError`: ``malformed`` for what is no certificate of ours, or as `verify_binding`.
    """
    key, binding = key_and_binding(certificate_der)
    return verify_binding(binding, swarm_digest, key, node_id, role)


def key_and_binding(certificate_der: bytes) -> tuple[bytes, bytes]:
    """An engine's key (DER) and what its node signed of it, of which nothing is checked here.

    Raises `RemoteProtocolError`, ``malformed``, for what is no certificate of ours.
    """
    try:
        with warnings.catch_warnings():
            # What a later release of the library will refuse is refused now, and not printed.
            warnings.simplefilter("error", CryptographyDeprecationWarning)
            certificate = x509.load_der_x509_certificate(certificate_der)
            extension = certificate.extensions.get_extension_for_oid(_OID).value
            key = public_der(certificate.public_key())
    except _NOT_A_CERTIFICATE as error:
        raise RemoteProtocolError("not an engine's certificate", code="malformed") from error
    assert isinstance(extension, x509.UnrecognizedExtension)
    return key, extension.value
