"""The hash chain over the replies of one connection, and the seal by which a worker's engine stands for it.

Both ends of a connection make the same chain: a link for each reply that has rows, of the link before and the
SHA-256 over (request, rows) that the reply carries. Now and then the backbone asks for a seal: the engine's
signature over how many replies there were, the last link, all expert programs that it was told, the claim
that its node is held to, and when that was. Seals are asked for by count and by time alone, so that a worker
never learns what is audited. What a link is of is not looked at here, and neither is whose the engine is
(`certificate`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import load_der_public_key

from kvasir_proto import SIGNATURE_DOMAIN
from kvasir_proto.dispatch import SEAL_BYTES
from kvasir_proto.errors import RemoteProtocolError

FIRST_LINK: Final = bytes(32)
"""Of a chain without replies, and of programs where none were told."""
NO_CLAIM: Final = bytes(32)
"""Stands for the claim of a node without certificates."""
SEALED_REPLIES: Final = 256
"""Replies after which a seal is asked for, if a second has not passed before."""
SEALED_REPLIES_MAX: Final = 512
"""The most that one seal is used for: replies that were under way come on top."""

_SEAL: Final = struct.Struct("<Q32s32s32sQ")
_DOMAIN: Final = SIGNATURE_DOMAIN + b" seal"
_HALF: Final = 32

assert _SEAL.size + 2 * _HALF == SEAL_BYTES


class Seal(NamedTuple):
    """What an engine signs of a connection so far; `claim` is `claim_in_seal`'s, `at` wall time in ns."""

    n_replies: int
    link: bytes
    programs: bytes
    claim: bytes
    at: int


def next_link(link: bytes, digest: bytes) -> bytes:
    """The link behind a reply with this digest."""
    return hashlib.sha256(link + digest).digest()


def last_link(link: bytes, digests: Iterable[bytes]) -> bytes:
    """The link behind all of these, in their order."""
    for digest in digests:
        link = next_link(link, digest)
    return link


def next_program(programs: bytes, index: int, program: bytes) -> bytes:
    """The digest of all programs that were told so far, and this one under that index."""
    return hashlib.sha256(programs + index.to_bytes(4, "big") + hashlib.sha256(program).digest()).digest()


def claim_in_seal(claim_digest: bytes) -> bytes:
    """A `CapabilityRecord.claim_digest` as it stands in a seal."""
    return claim_digest or NO_CLAIM


def sign_seal(seal: Seal, model_digest: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """The `SEAL_BYTES` of a seal. `sign` gives an ECDSA signature over P-256 and SHA-256, as DER."""
    said = _SEAL.pack(*seal)
    r, s = decode_dss_signature(sign(_signed(said, model_digest)))
    return said + r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")


def open_seal(data: bytes, model_digest: bytes, engine_key: bytes) -> Seal:
    """What the engine with this key (DER) has sealed. Raises `RemoteProtocolError`, `unaccountable`."""
    refusal = RemoteProtocolError("the seal is not that engine's", "unaccountable")
    if len(data) != SEAL_BYTES:
        raise refusal
    said, signature = data[: _SEAL.size], data[_SEAL.size :]
    r, s = (int.from_bytes(each, "big") for each in (signature[:_HALF], signature[_HALF:]))
    try:
        key = _key_of(engine_key)
        key.verify(encode_dss_signature(r, s), _signed(said, model_digest), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        raise refusal from None
    return Seal(*_SEAL.unpack(said))


@lru_cache(maxsize=64)
def _key_of(der: bytes) -> ec.EllipticCurvePublicKey:
    """Remembered: an engine's seals come every second. Raises `ValueError` for what is no such key."""
    key = load_der_public_key(der)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("an engine's key is on an elliptic curve")
    return key


def link_said(data: bytes) -> bytes:
    """The last link by the word of whoever made this seal, of which nothing was checked."""
    return data[8:40]


def _signed(said: bytes, model_digest: bytes) -> bytes:
    return _DOMAIN + model_digest + said
