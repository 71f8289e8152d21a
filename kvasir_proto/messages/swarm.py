"""What two nodes say to each other on a control stream: short conversations of questions and answers.

Who somebody is and which swarm is here (`Hello`, `Welcome`), what its model is made of (`ManifestRequest`,
`ManifestPiece`) and where that is (`SourceRequest`, `Sources`), and the way from one engine to another
(`DataRequest`, `DataGrant`). What needs authority carries its `proof`: the term proof of the backbone that
says it. Payloads that are signed travel as the bytes that were signed. Anything can be answered with
`Refusal`. Nothing here can carry a routing choice, a weight or an expert program (invariants 1 and 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypeAlias, get_args

from kvasir_proto.ids import ModelDigestField
from kvasir_proto.limits import (
    MANIFEST_PIECE_SIZE_MAX,
    MANIFEST_PIECES_MAX,
    MODEL_ADDRESSES_MAX,
    SWARM_FRAME_SIZE_MAX,
    CertificateDer,
    Host,
    Length,
    ModelAddress,
    OneTimeToken,
    Port,
    ProofBytes,
    Range,
    Role,
    Sentence,
    SignedBytes,
    Version,
    Versions,
    Word,
)
from kvasir_proto.messages import Family


@dataclass(frozen=True, slots=True)
class Hello:
    """The dialler's first message: the protocol versions it speaks, and its build for people to read."""

    kind: ClassVar[str] = "hello"
    versions: Versions
    node_version: Word


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`: the version to speak, and the swarm's manifest as its founder signed it."""

    kind: ClassVar[str] = "welcome"
    version: Version
    swarm_manifest: SignedBytes


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last message was not acceptable, or cannot be done: a code for programs, a sentence for people."""

    kind: ClassVar[str] = "refusal"
    code: Word
    reason: Sentence


@dataclass(frozen=True, slots=True)
class DataRequest:
    """Asks that the receiver's engine expect a data connection from the engine with this certificate."""

    kind: ClassVar[str] = "data_request"
    engine_certificate: CertificateDer
    role: Role
    proof: ProofBytes


@dataclass(frozen=True, slots=True)
class DataGrant:
    """The answer to `DataRequest`: where to dial, the one-time token to show, and whom to expect there.

    An auditor is also shown the node's tolerance certificate, an encoded `Signed`.
    """

    kind: ClassVar[str] = "data_grant"
    host: Host
    port: Port
    token: OneTimeToken
    engine_certificate: CertificateDer
    tolerance_certificate: Annotated[bytes, Length(0, 16 << 10)] = b""


@dataclass(frozen=True, slots=True)
class ManifestRequest:
    """Asks for one piece of the model manifest of this name, counted from 0."""

    kind: ClassVar[str] = "manifest_request"
    model_digest: ModelDigestField
    piece: Annotated[int, Range(0, MANIFEST_PIECES_MAX - 1)]


@dataclass(frozen=True, slots=True)
class ManifestPiece:
    """The answer to `ManifestRequest`: how many pieces the manifest has, and the bytes of this one.

    Nothing is believed of it: the whole has the model's name, or is none.
    """

    kind: ClassVar[str] = "manifest_piece"
    n_pieces: Annotated[int, Range(1, MANIFEST_PIECES_MAX)]
    data: Annotated[bytes, Length(1, MANIFEST_PIECE_SIZE_MAX)]


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """Asks where on the web the model of this name can be had."""

    kind: ClassVar[str] = "source_request"
    model_digest: ModelDigestField


@dataclass(frozen=True, slots=True)
class Sources:
    """The answer to `SourceRequest`: addresses, none where this node knows or tells none.

    They are hints. Whoever follows one sends a request where somebody else wants it sent.
    """

    kind: ClassVar[str] = "sources"
    urls: Annotated[tuple[ModelAddress, ...], Length(0, MODEL_ADDRESSES_MAX)]


SwarmMessage: TypeAlias = (
    Hello
    | Welcome
    | Refusal
    | DataRequest
    | DataGrant
    | ManifestRequest
    | ManifestPiece
    | SourceRequest
    | Sources
)

SWARM: Final[Family[SwarmMessage]] = Family("swarm", get_args(SwarmMessage), SWARM_FRAME_SIZE_MAX)
