"""A model's manifest from one node to another, in pieces on a control stream, and where the model is.

Decides how much of it an answer has and when what came counts: only whole, and only where its digest is the
name that was asked for. Anybody may ask, as for the swarm's own manifest: a newcomer is no member yet, and
digests tell nothing of weights. Addresses are told where the user allows it, and are hints: whoever follows
one compares what is there with the manifest. Whom to ask is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import trio

from kvasir_node.driver.conversation import ask
from kvasir_node.ports import ControlStream
from kvasir_node.telemetry import get_logger
from kvasir_proto.errors import RemoteProtocolError, TransportUnavailable
from kvasir_proto.ids import ModelDigest
from kvasir_proto.limits import MANIFEST_PIECE_SIZE_MAX
from kvasir_proto.manifest import ModelManifest
from kvasir_proto.messages.swarm import ManifestPiece, ManifestRequest, SourceRequest, Sources

log = get_logger()

MANIFEST_TIMEOUT_S: Final = 120.0
"""For all of it: 64 MiB at half a MiB a second."""


class ManifestPieces:
    """The manifest of this node's model, and ``addresses`` of it, for those who ask."""

    def __init__(self, manifest: ModelManifest, addresses: Sequence[str] = ()) -> None:
        self._digest = manifest.digest()
        self._addresses = tuple(addresses)
        self._data = manifest.encode()

    def answer(self, request: ManifestRequest) -> ManifestPiece:
        """One piece. Raises `RemoteProtocolError` for another model or a piece that it has not."""
        if request.model_digest != self._digest:
            raise RemoteProtocolError("this node has another model", "wrong_model")
        begin = request.piece * MANIFEST_PIECE_SIZE_MAX
        data = self._data[begin : begin + MANIFEST_PIECE_SIZE_MAX]
        if not data:
            raise RemoteProtocolError("the manifest has no such piece", "no_such_piece")
        return ManifestPiece(-(-len(self._data) // MANIFEST_PIECE_SIZE_MAX), data)

    def sources(self, request: SourceRequest) -> Sources:
        """Where the model is. Raises `RemoteProtocolError` for another model."""
        if request.model_digest != self._digest:
            raise RemoteProtocolError("this node has another model", "wrong_model")
        return Sources(self._addresses)


async def fetch_addresses(stream: ControlStream, digest: bytes) -> tuple[str, ...]:
    """What the node at the other end says of where the model is; nothing where it does not say."""
    try:
        return (await ask(stream, SourceRequest(ModelDigest(digest)), Sources)).urls
    except (RemoteProtocolError, TransportUnavailable) as error:
        log.info("addresses_not_told", reason=str(error))
        return ()


async def fetch_manifest(stream: ControlStream, digest: bytes) -> ModelManifest:
    """The manifest of the model of this name, from the node at the other end.

    Raises `RemoteProtocolError` for what is not that manifest, `TransportUnavailable` where it does not all
    come in time.
    """
    pieces: list[bytes] = []
    n_pieces = 1
    try:
        with trio.fail_after(MANIFEST_TIMEOUT_S):
            while len(pieces) < n_pieces:
                request = ManifestRequest(ModelDigest(digest), len(pieces))
                piece = await ask(stream, request, ManifestPiece)
                if pieces and piece.n_pieces != n_pieces:
                    raise RemoteProtocolError("the manifest has another size than before", "manifest_invalid")
                n_pieces = piece.n_pieces
                pieces.append(piece.data)
    except trio.TooSlowError:
        raise TransportUnavailable("the model's manifest did not come in time") from None
    manifest = ModelManifest.decode(b"".join(pieces))
    if manifest.digest() != digest:
        raise RemoteProtocolError("it gave the manifest of another model", "wrong_model")
    return manifest
