"""The gateway's life in a daemon, without sockets, processes or a swarm."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import trio
import trio.testing

from kvasir_node.driver.gateway_duty import CHILD_IDLE_S, GatewayDuty, GatewaySettings
from kvasir_node.driver.status_report import StatusSources
from kvasir_node.gateway.doors import Doors
from kvasir_node.model.store import StoredModel
from kvasir_node.tokenizer.vocabulary import Vocabulary
from kvasir_proto.errors import ModelUnusable, PortInUse, TransportUnavailable
from kvasir_proto.instants import Instant
from kvasir_proto.term_proof import ProvenTerm
from tests.node.driver.test_status_report import OWN, STARTED, swarm_with, view_with
from tests.node.gateway.http_client import HttpClient
from tests.node.gateway.test_gateway import CHAT, body, events_of
from tests.node.gateway.toy_swarm import BytesTokenizer, PlainTemplates, Script, ScriptedCompletions


class MemoryListener(trio.abc.Listener[trio.abc.Stream]):
    """Takes connections that the test makes."""

    def __init__(self) -> None:
        self._into, self._out = trio.open_memory_channel[trio.abc.Stream](9)
        self.is_closed = False
        self.socket = self

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 4711

    async def connect(self) -> HttpClient:
        ours, theirs = trio.testing.memory_stream_pair()
        await self._into.send(theirs)
        return HttpClient(ours)

    async def accept(self) -> trio.abc.Stream:
        return await self._out.receive()

    async def aclose(self) -> None:
        self.is_closed = True


class ToyModel:
    """What the duty asks of a stored model."""

    backbone_path = Path("backbone.gguf")
    metadata_sha256 = b"digest"

    @property
    def manifest(self) -> ToyModel:
        return self

    def context_length(self, wanted: int) -> int:
        return min(wanted, 64)

    def taken_in_at_s(self) -> int:
        return 5


class ToyTokenizer(BytesTokenizer):
    """A byte a token; its vocabulary cannot be read so many times."""

    def __init__(self) -> None:
        self.n_failures = 0
        self.idle_s = 0.0

    async def read(self, path: Path, metadata_sha256: bytes) -> Vocabulary:
        await trio.lowlevel.checkpoint()
        assert (path, metadata_sha256) == (ToyModel.backbone_path, ToyModel.metadata_sha256)
        if self.n_failures:
            self.n_failures -= 1
            raise ModelUnusable("the vocabulary is damaged")
        return Vocabulary(array("I", range(1, 258)), bytes(257), "", "", (256,), "{{ x }}")

    async def end_when_idle(self, idle_s: float) -> None:
        self.idle_s = idle_s
        await trio.sleep_forever()


class World:
    """A duty and what it stands on."""

    def __init__(self) -> None:
        self.listener = MemoryListener()
        self.refusals: list[Exception] = []
        self.completions = ScriptedCompletions()
        self.tokenizer = ToyTokenizer()
        self.has_model = trio.Event()
        self.sources = StatusSources(node_id=OWN, state="joining", reason="looking", started=STARTED)
        self.duty = GatewayDuty(
            settings=GatewaySettings(Doors("127.0.0.1"), 8585, 4096),
            completions=self.completions,
            tokenizer=self.tokenizer,
            templates=PlainTemplates(),
            open_listeners=self.open_listeners,
            known=lambda: self.sources,
            wait_model=self.wait_model,
            now=lambda: Instant(STARTED),
        )

    async def open_listeners(self, host: str, port: int) -> Sequence[trio.SocketListener]:
        await trio.lowlevel.checkpoint()
        assert (host, port) == ("127.0.0.1", 8585)
        if self.refusals:
            raise self.refusals.pop(0)
        return cast("list[trio.SocketListener]", [self.listener])

    async def wait_model(self) -> StoredModel:
        await self.has_model.wait()
        return cast("StoredModel", ToyModel())

    def note_ready(self) -> None:
        self.sources = StatusSources(
            node_id=OWN,
            state="ready",
            reason="",
            started=STARTED,
            swarm=swarm_with(),
            view=view_with(fence=ProvenTerm(0, 1, OWN)),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[HttpClient]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.duty.run)
            await trio.testing.wait_all_tasks_blocked()
            yield await self.listener.connect()
            nursery.cancel_scope.cancel()


async def readiness(client: HttpClient) -> tuple[int, Any]:
    answer = await client.ask("GET", "/health/ready")
    return answer.status, answer.document.get("reason")


async def test_it_answers_at_once_and_says_what_it_waits_for(autojump_clock: trio.testing.MockClock) -> None:
    world = World()
    async with world.running() as client:
        assert (await client.ask("GET", "/health/live")).status == 200
        assert await readiness(client) == (503, "this node is joining: looking")
        assert world.duty.status()["state"] == "joining"
        world.note_ready()
        assert await readiness(client) == (503, "the model's vocabulary is being read")
        world.tokenizer.n_failures = 2
        world.has_model.set()
        await trio.testing.wait_all_tasks_blocked()
        assert await readiness(client) == (503, "the vocabulary is damaged")
        await trio.sleep(3.5)
        assert await readiness(client) == (200, None)
        assert world.tokenizer.idle_s == CHILD_IDLE_S
        models = (await client.ask("GET", "/v1/models")).document["data"]
        assert [(each["id"], each["created"], each["context_tokens"]) for each in models] == [("tiny", 5, 64)]
        answer = await client.ask("POST", CHAT, body(CHAT, model="tiny"))
        assert answer.document["choices"][0]["message"]["content"] == "Hello"


async def test_a_port_that_is_taken_is_tried_again(autojump_clock: trio.testing.MockClock) -> None:
    world = World()
    world.refusals = [PortInUse("port 8585 is in use"), TransportUnavailable("no such address")]
    assert world.duty.report()["reason"] == "it is being opened"
    async with world.running() as client:
        report = world.duty.report()
        assert (report["address"], report["is_answering"]) == (None, False)
        assert report["reason"] == "port 8585 is in use; gateway.port chooses another one"
        await trio.sleep(1.5)
        assert world.duty.report()["reason"] == "no such address"
        await trio.sleep(2)
        assert world.duty.report() == {
            "is_enabled": True,
            "address": "http://127.0.0.1:4711",
            "is_answering": True,
            "needs_token": False,
            "reason": "",
        }
        assert (await client.ask("GET", "/health/live")).status == 200


async def test_streams_come_to_their_end_when_the_daemon_stops(
    autojump_clock: trio.testing.MockClock,
) -> None:
    world = World()
    world.note_ready()
    world.has_model.set()
    world.completions.script = Script(b"abc", interval_s=100.0)
    async with world.running() as client:
        await client.send("POST", CHAT, body(CHAT, model="tiny", stream=True))
        idle = await world.listener.connect()
        assert await readiness(idle) == (200, None)
        await trio.sleep(1)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.duty.end)
            *_, error = events_of(await client.receive())
        assert "stopping" in error["error"]["message"]
        assert trio.current_time() == began
        assert world.listener.is_closed
        assert await idle.stream.receive_some(1) == b""
        await trio.testing.wait_all_tasks_blocked()
        assert world.duty.report()["is_answering"] is False


async def test_it_can_end_before_it_listens(autojump_clock: trio.testing.MockClock) -> None:
    world = World()
    world.refusals = [PortInUse("taken")] * 9
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.duty.run)
        await trio.sleep(3)
        await world.duty.end()
        assert trio.current_time() == 3
        nursery.cancel_scope.cancel()
