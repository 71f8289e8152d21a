"""A manifest in pieces: whole and of the name that was asked for, or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.driver import manifest_exchange
from kvasir_node.driver.manifest_exchange import (
    MANIFEST_TIMEOUT_S,
    ManifestPieces,
    fetch_addresses,
    fetch_manifest,
)
from kvasir_node.model.store import StoredModel
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import RemoteProtocolError, TransportUnavailable
from kvasir_proto.ids import ModelDigest
from kvasir_proto.manifest import ModelManifest
from kvasir_proto.messages.swarm import (
    SWARM,
    ManifestPiece,
    ManifestRequest,
    Refusal,
    SourceRequest,
    SwarmMessage,
)

Answer = Callable[[Any], SwarmMessage]


class Answering:
    """The other end of a stream, which answers each message at once or after a while."""

    def __init__(self, answer: Answer, delay_s: float = 0.0) -> None:
        self.answer = answer
        self.delay_s = delay_s
        self.asked: list[int] = []

    async def send(self, data: bytes) -> None:
        """See `ports.ControlStream`."""
        request = decode(data, SWARM)
        assert isinstance(request, ManifestRequest | SourceRequest)
        if isinstance(request, ManifestRequest):
            self.asked.append(request.piece)
        self.request = request
        await trio.lowlevel.checkpoint()

    async def receive(self, timeout_s: float) -> bytes:
        """See `ports.ControlStream`."""
        await trio.sleep(self.delay_s)
        return encode(self.answer(self.request))

    async def close(self) -> None:
        """See `ports.ControlStream`."""


@pytest.fixture
def manifest(model: StoredModel, monkeypatch: pytest.MonkeyPatch) -> ModelManifest:
    monkeypatch.setattr(manifest_exchange, "MANIFEST_PIECE_SIZE_MAX", 1000)
    return model.manifest


async def test_a_manifest_comes_whole_in_as_many_pieces_as_it_has(manifest: ModelManifest) -> None:
    stream = Answering(ManifestPieces(manifest).answer)
    assert await fetch_manifest(stream, manifest.digest()) == manifest
    assert stream.asked == list(range(-(-len(manifest.encode()) // 1000)))
    assert len(stream.asked) > 3


async def test_what_is_not_here_is_refused(manifest: ModelManifest) -> None:
    pieces = ManifestPieces(manifest)
    with pytest.raises(RemoteProtocolError, match="has no such piece"):
        pieces.answer(ManifestRequest(ModelDigest(manifest.digest()), 1023))
    with pytest.raises(RemoteProtocolError, match="has another model"):
        pieces.answer(ManifestRequest(ModelDigest(bytes(32)), 0))


def changed(pieces: ManifestPieces, at: int, change: Callable[[ManifestPiece], SwarmMessage]) -> Answer:
    def answer(request: ManifestRequest) -> SwarmMessage:
        piece = pieces.answer(request)
        return change(piece) if request.piece == at else piece

    return answer


LIES: dict[str, tuple[int, Callable[[ManifestPiece], SwarmMessage], str]] = {
    "a flipped bit": (
        1,
        lambda each: replace(each, data=bytes([each.data[0] ^ 1]) + each.data[1:]),
        "manifest",
    ),
    "a piece cut short": (1, lambda each: replace(each, data=each.data[:-1]), "manifest"),
    "fewer pieces": (0, lambda each: replace(each, n_pieces=1), "manifest"),
    "more pieces after all": (1, lambda each: replace(each, n_pieces=each.n_pieces + 1), "another size"),
    "a refusal": (2, lambda each: Refusal("busy", "not now"), "not now"),
    "something else": (2, lambda each: ManifestRequest(ModelDigest(bytes(32)), 0), "is no answer"),
}


@pytest.mark.parametrize("case", LIES)
async def test_what_is_not_that_manifest_is_refused(manifest: ModelManifest, case: str) -> None:
    at, change, reason = LIES[case]
    stream = Answering(changed(ManifestPieces(manifest), at, change))
    with pytest.raises(RemoteProtocolError, match=reason):
        await fetch_manifest(stream, manifest.digest())


async def test_another_models_manifest_is_refused_though_it_is_one(manifest: ModelManifest) -> None:
    other = replace(manifest, n_ctx_train=manifest.n_ctx_train + 1)
    pieces = ManifestPieces(other)
    stream = Answering(lambda asked: pieces.answer(replace(asked, model_digest=ModelDigest(other.digest()))))
    with pytest.raises(RemoteProtocolError, match="the manifest of another model"):
        await fetch_manifest(stream, manifest.digest())


async def test_one_that_comes_too_slowly_is_given_up(
    autojump_clock: MockClock, manifest: ModelManifest
) -> None:
    stream = Answering(ManifestPieces(manifest).answer, delay_s=MANIFEST_TIMEOUT_S / 3)
    with pytest.raises(TransportUnavailable, match="in time"):
        await fetch_manifest(stream, manifest.digest())


async def test_addresses_are_told_of_this_model_only(manifest: ModelManifest) -> None:
    pieces = ManifestPieces(manifest, ("https://a.example/m.gguf",))
    digest = ModelDigest(manifest.digest())
    assert pieces.sources(SourceRequest(digest)).urls == ("https://a.example/m.gguf",)
    with pytest.raises(RemoteProtocolError, match="another model"):
        pieces.sources(SourceRequest(ModelDigest(bytes(32))))
    assert ManifestPieces(manifest).sources(SourceRequest(digest)).urls == ()


async def test_who_does_not_say_where_a_model_is_has_said_nothing(manifest: ModelManifest) -> None:
    """A node of before knows no such question."""
    for answer in (Refusal("unknown_kind", "what?"), ManifestPiece(1, b"x")):
        stream = Answering(lambda _, answer=answer: answer)  # type: ignore[misc]
        assert await fetch_addresses(stream, manifest.digest()) == ()
