"""A daemon's control socket in a thread of the test: the real server, answering what the test says."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import trio

from kvasir_node.control import ControlServer
from kvasir_node.locations import locate
from kvasir_proto.codec import decode
from kvasir_proto.election.configuration import LINK
from kvasir_proto.errors import NotReady
from kvasir_proto.messages.local import (
    EvaluateReply,
    EvaluateRequest,
    GenerateEnd,
    GenerateRequest,
    InviteReply,
    InviteRequest,
    PingReply,
    PingRequest,
    RecoveryReply,
    RecoveryRequest,
    RevocationReply,
    RevocationRequest,
    TokenEvent,
)


class DaemonTwin:
    """What the daemon answers; a test changes it as it likes."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.pinged: list[PingRequest] = []
        self.invited: list[InviteRequest] = []
        self.recovered: list[RecoveryRequest] = []
        self.revoked: list[RevocationRequest] = []
        self.round_trip: Callable[[PingRequest], int] = lambda _: 1_500_000
        self.invite: Callable[[InviteRequest], str] | None = None

    async def status_document(self) -> str:
        return json.dumps(self.document)

    async def generate(
        self, request: GenerateRequest, emit: Callable[[TokenEvent], Awaitable[None]]
    ) -> GenerateEnd:
        raise NotReady("this is a twin")

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        raise NotReady("this is a twin")

    async def ping(self, request: PingRequest) -> PingReply:
        self.pinged.append(request)
        return PingReply(self.round_trip(request))

    async def issue_invite(self, request: InviteRequest) -> InviteReply:
        self.invited.append(request)
        if self.invite is None:
            raise NotReady("only an elector or the founder invites")
        return InviteReply(self.invite(request))

    async def recover(self, request: RecoveryRequest) -> RecoveryReply:
        self.recovered.append(request)
        return RecoveryReply(decode(request.link, LINK).electorate.epoch)

    async def revoke(self, request: RevocationRequest) -> RevocationReply:
        self.revoked.append(request)
        return RevocationReply()

    def stop(self) -> None:
        raise AssertionError("nobody asked for that")


@contextlib.contextmanager
def twin_daemon(home: Path, document: dict[str, Any]) -> Iterator[DaemonTwin]:
    """Serve the control socket of this home until the end of the block."""
    locations = locate(home, {})
    locations.prepare()
    twin = DaemonTwin(document)
    listening = threading.Event()
    scope = trio.CancelScope()
    token: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        token.append(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(ControlServer(locations.control_socket, twin).run)
                listening.set()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        assert listening.wait(20)
        yield twin
    finally:
        token[0].run_sync_soon(scope.cancel)
        thread.join(20)
