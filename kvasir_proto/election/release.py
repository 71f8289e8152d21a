"""A backbone's signed word that it uses its lease no more: its electors' promises end at once.

It names the term, and a node that released a term never asks for a lease in it again; so a release that is
heard late, or twice, frees nobody who is bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import Epoch, NodeId, NodeIdField, SwarmDigest, Term
from kvasir_proto.messages import Family
from kvasir_proto.messages.election import BALLOT_SIZE_MAX
from kvasir_proto.signing import open_signed, sign_message
from kvasir_proto.term_proof import ProvenTerm


@dataclass(frozen=True, slots=True)
class Release:
    """The backbone of (epoch, term) has let go of its lease."""

    kind: ClassVar[str] = "release"
    epoch: Epoch
    term: Term
    backbone: NodeIdField


RELEASE: Final = Family("release", (Release,), BALLOT_SIZE_MAX)


def make_release(private_key: Ed25519PrivateKey, swarm_digest: SwarmDigest, term: ProvenTerm) -> bytes:
    """The encoded, signed release of the term that this key's node is the backbone of."""
    return sign_message(private_key, swarm_digest, Release(*term))


def verify_release(data: bytes, swarm_digest: SwarmDigest, fence: ProvenTerm | None) -> ProvenTerm:
    """The released term, if its own backbone signed it and it is the one that is followed.

    Raises `RemoteProtocolError`: as `open_signed` does, or `wrong_release`.
    """
    opened = open_signed(data, RELEASE, swarm_digest)
    release = opened.message
    term = ProvenTerm(release.epoch, release.term, NodeId(release.backbone))
    if opened.signer != term.backbone or term != fence:
        raise RemoteProtocolError("not the release of the term that is followed", "wrong_release")
    return term
