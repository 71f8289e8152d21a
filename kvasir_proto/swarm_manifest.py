"""What makes a swarm one swarm: its model, its tolerances, who may join, and two keys.

The founder signs it once; its digest is the swarm's name and is covered by every signature made in the swarm.
The founder's key names electors and revokes members; the recovery key, kept off the nodes, starts a new epoch
when a quorum is lost for good. Decides nothing itself: it is what everything else is checked against.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import ModelDigestField, SwarmDigest
from kvasir_proto.limits import Length, Probability, PublicKey, Range, Word
from kvasir_proto.messages import Family
from kvasir_proto.signing import SIGNED, sign, verify

AUDITORS_MAX: Final = 16
"""Keys of auditors that a manifest may name."""

AdmissionRule: TypeAlias = Literal["open", "invite"]
"""Anybody may be a member, or only who holds a credential."""
ElectorateRule: TypeAlias = Literal["pinned", "open"]
"""Electors are named by the founder's key and may crash, or others may vote too and some may lie."""

CertificateRule: TypeAlias = Literal["claimed", "verified"]
"""A node's own word makes it fit for a rank, or its auditors'."""

_Divergence: TypeAlias = Annotated[float, Range(0.0, 100.0)]
_ModelName: TypeAlias = Annotated[str, Length(1, 128)]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What the swarm calls equivalent (DESIGN section 5), by default.

    `top1_agreement_min` is a share of positions and `mean_kld_max` in nats. The gates of classes are the
    protocol's (`tolerance`): they follow from arithmetic and shapes, and no founder can wish for others.
    """

    top1_agreement_min: Probability = 0.995
    mean_kld_max: _Divergence = 1e-3


@dataclass(frozen=True, slots=True)
class SwarmManifest:
    """The founding document of a swarm. `reference_class` names the activation formats its kernels share.

    `admission` says whether a member needs a credential, `electorate` how electors decide (`term_proof`), and
    `certificates` whose word makes a node fit for a rank: its own, or that of auditors, who are the electors
    and the holders of `auditor_public_keys`. With `compact_activations` rows travel to holders in the
    smallest wire type that changes no result. With `partial_sums` holders of bulk layers answer with weighted
    sums, which is equivalent and not exact.
    """

    kind: ClassVar[str] = "swarm_manifest"
    model_digest: ModelDigestField
    model_name: _ModelName
    reference_class: Word
    thresholds: Thresholds
    admission: AdmissionRule
    compact_activations: bool
    partial_sums: bool
    founder_public_key: PublicKey
    recovery_public_key: PublicKey
    electorate: ElectorateRule = "pinned"
    certificates: CertificateRule = "claimed"
    auditor_public_keys: Annotated[tuple[PublicKey, ...], Length(0, AUDITORS_MAX)] = ()


SWARM_MANIFEST: Final = Family("swarm manifest", (SwarmManifest,), 16 << 10)


class FoundedSwarm(NamedTuple):
    """A swarm manifest that its founder signed, and the swarm's name."""

    manifest: SwarmManifest
    digest: SwarmDigest


def sign_swarm_manifest(manifest: SwarmManifest, founder_key: Ed25519PrivateKey) -> bytes:
    """The encoded `Signed` that founds a swarm. Raises `LocalProtocolError` for a key not the founder's."""
    if founder_key.public_key().public_bytes_raw() != manifest.founder_public_key:
        raise LocalProtocolError("a swarm manifest is signed with its founder's key")
    payload = encode(manifest)
    return encode(sign(founder_key, SwarmManifest.kind, _digest_of(payload), payload))


def open_swarm_manifest(data: bytes, expected: SwarmDigest | None = None) -> FoundedSwarm:
    """The manifest in an encoded `Signed`, if its own founder signed it, and if it is the expected swarm's.

    Raises `RemoteProtocolError`: as `decode` and `verify` do, or `wrong_founder`, `wrong_swarm`.
    """
    signed = decode(data, SIGNED)
    digest = _digest_of(signed.payload)
    if expected is not None and digest != expected:
        raise RemoteProtocolError("this is the manifest of another swarm", "wrong_swarm")
    manifest = decode(verify(signed, SwarmManifest.kind, digest), SWARM_MANIFEST)
    if signed.signer != manifest.founder_public_key:
        raise RemoteProtocolError("the swarm manifest is not signed by its founder", "wrong_founder")
    return FoundedSwarm(manifest, digest)


def _digest_of(payload: bytes) -> SwarmDigest:
    return SwarmDigest(hashlib.sha256(payload).digest())
