"""The worker engine in this process: who gets in, who does not, and what moves old connections out.

Connections are real TLS over loopback TCP; the shard is a real one of a tiny model on ggml.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from kvasir_node.backbone.holder import IndexBuffer, RemoteHolder, Request, open_remote_holder
from kvasir_node.engine.channel import ControlChannel
from kvasir_node.engine.lease import boottime_ns
from kvasir_node.engine.tls import connect_pinned, pinned_context
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.worker import engine as engine_module
from kvasir_node.worker.engine import WorkerEngine
from kvasir_proto import dispatch
from kvasir_proto.dispatch import FrameKind, Opening, ReplyCode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import node_id_of
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.messages.engine import (
    DiallerExpected,
    EngineFault,
    EngineMessage,
    EngineStatistics,
    ExpectDialler,
    ExpertsMeasured,
    Listen,
    Listening,
    LoadShard,
    MeasureExperts,
    QueryStatistics,
    SetFence,
    SetLease,
    ShardLoaded,
)
from kvasir_proto.program import ExpertProgram, GluKind, ProgramStep, StepOp
from tests.loopback.daemons import wait_for
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.tls_ends import EngineEnd, backbone_end, make_engine_end, tls_pair, worker_end

HOST = "127.0.0.1"
NODE = node_id_of(b"\x03" * 32)
SWIGLU = ExpertProgram(
    (
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_gate_exps.weight"),
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_up_exps.weight"),
        ProgramStep(StepOp.GLU, 1, 2, params=struct.pack("<4i", GluKind.SWIGLU, 0, 0, 0)),
        ProgramStep(StepOp.EXPERT_MATMUL, 3, tensor="ffn_down_exps.weight"),
    ),
    input_per_slot=False,
)
MessageT = TypeVar("MessageT")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, ModelManifest]:
    """(model file, manifest file, manifest) of two layers with four experts."""
    directory = tmp_path_factory.mktemp("model")
    path = make_qwen3moe(directory / "model.gguf", ModelShape(n_layer=2, n_expert=4, n_embd=32))
    manifest = build_manifest(path)
    manifest_path = directory / "manifest"
    manifest_path.write_bytes(manifest.encode())
    return path, manifest_path, manifest


class Worker:
    """A worker engine, control's end of its channel, and what a backbone needs to dial it."""

    def __init__(self, model: tuple[Path, Path, ModelManifest]) -> None:
        self.source_path, self.manifest_path, self.manifest = model
        ours, theirs = socket.socketpair()
        ours.settimeout(20.0)
        self._ours, self._theirs = ours, theirs
        self.control = ControlChannel(ours)
        self.engine = WorkerEngine(ControlChannel(theirs), worker_end().credentials)
        self.port = 0
        self._connections: list[socket.socket] = []

    def tell(self, message: EngineMessage, reply_type: type[MessageT]) -> MessageT:
        self.engine.handle(message)
        reply = self.control.receive()
        assert isinstance(reply, reply_type), reply
        return reply

    def listen(self, host: str = HOST, port: int = 0) -> None:
        self.port = self.tell(Listen(host, port), Listening).port

    def load(self, *experts: int, shard: ShardSet | None = None) -> ShardLoaded:
        shard = shard or ShardSet.from_pairs((layer, expert) for layer in (0, 1) for expert in experts)
        return self.tell(
            LoadShard(1, str(self.manifest_path), str(self.source_path), shard.encode(), 1), ShardLoaded
        )

    def expect(self, end: EngineEnd | None = None, *, lifetime_ns: int = 10**10) -> bytes:
        token = secrets.token_bytes(16)
        certificate = (end or backbone_end()).certificate
        expected = ExpectDialler(token, certificate, "backbone", NODE, boottime_ns() + lifetime_ns)
        assert self.tell(expected, DiallerExpected).token == token
        return token

    def dial(self, token: bytes | None = None, end: EngineEnd | None = None) -> ssl.SSLSocket:
        connection = connect_pinned(
            (end or backbone_end()).credentials,
            HOST,
            self.port,
            self.expect() if token is None else token,
            worker_end().certificate,
        )
        self._connections.append(connection)
        return connection

    def connect(self, connection: ssl.SSLSocket | None = None, term: int = 1) -> RemoteHolder:
        opening = Opening(0, term, b"proof", self.manifest.digest())
        return open_remote_holder(NODE, connection or self.dial(), opening.encode())

    def raw(self) -> socket.socket:
        """A TCP connection that has said nothing yet."""
        sock = socket.create_connection((HOST, self.port), timeout=20.0)
        self._connections.append(sock)
        return sock

    def statistics(self) -> dict[str, int]:
        reply = self.tell(QueryStatistics(5), EngineStatistics)
        assert reply.request == 5
        values: dict[str, int] = json.loads(reply.values_json)
        return values

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline, "it did not come to that"

    def close(self) -> None:
        self.engine.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()
        self.wait(lambda: not self.engine._connections and not self.engine._strangers)
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def worker(model: tuple[Path, Path, ModelManifest]) -> Iterator[Worker]:
    worker = Worker(model)
    yield worker
    worker.close()


@pytest.fixture
def serving(worker: Worker) -> Worker:
    """It holds experts 0 to 2 of both layers under (0, 1), and listens."""
    worker.engine.handle(SetFence(0, 1))
    worker.load(0, 1, 2)
    worker.listen()
    return worker


def ask(holder: RemoteHolder, experts: list[int], layer: int = 0, term: int = 1) -> ReplyCode:
    """One dispatch of one row to these experts; the code of the reply."""
    frame = bytearray(dispatch.HEADER_BYTES)
    n_pairs = len(experts)
    dispatch.pack_dispatch_into(
        frame,
        request_id=8,
        epoch=0,
        term=term,
        layer=layer,
        program=0,
        n_rows=1,
        n_pairs=n_pairs,
        n_embd_in=32,
    )
    payload = struct.pack(f"<{2 * n_pairs}i", *[0] * n_pairs, *experts) + np.ones(32, np.float32).tobytes()
    frames = {7: dispatch.pack_plain(FrameKind.PROGRAM, 7, SWIGLU.encode()), 8: bytes(frame) + payload}
    for number, data in frames.items():
        n_asked = n_pairs if number == 8 else 0
        indices = IndexBuffer(np.arange(n_asked, dtype=np.int32))
        holder.submit(Request(number, memoryview(data), indices, 0, n_asked, n_asked, 32, 0, 1 << 62))
    holder.send_pending()
    code = ReplyCode.OK
    deadline = time.monotonic() + 20.0
    while holder.outstanding:
        try:
            holder.receive_reply()
        except RemoteProtocolError as error:
            code = ReplyCode[error.code.removeprefix("refused_").upper()]
            holder.outstanding.popleft()
        assert time.monotonic() < deadline
    return code


def is_ended(connection: socket.socket) -> bool:
    """Whether the other end closes this connection, sooner or later, without a word."""
    connection.settimeout(20.0)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


# ---- Loading ----


def test_a_shard_is_loaded_and_measured(worker: Worker) -> None:
    shard = ShardSet.from_pairs([(0, 1), (1, 3)])
    loaded = worker.load(shard=shard)
    assert loaded.request == 1
    assert loaded.shard_digest == shard.digest()
    assert loaded.memory_bytes >= worker.manifest.shard_size_bytes(shard)
    assert worker.statistics()["memory_bytes"] == loaded.memory_bytes


@pytest.mark.parametrize(
    "allowed, threads, expected", [(None, 1, 4000), (0.1, 1, 40_000), (2.0, 1, 4000), (2.0, 4, 8000)]
)
def test_it_measures_itself_and_says_what_a_limit_of_its_processors_leaves(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, allowed: float | None, threads: int, expected: int
) -> None:
    monkeypatch.setattr(engine_module, "measure_row_ns", lambda *_all: 4000)
    monkeypatch.setattr(engine_module, "processors_allowed", lambda: allowed)
    request = MeasureExperts(7, str(worker.manifest_path), threads, "ggml-cpu", "auto")
    assert worker.tell(request, ExpertsMeasured) == ExpertsMeasured(7, expected)


def test_what_cannot_be_measured_is_a_fault(worker: Worker, tmp_path: Path) -> None:
    request = MeasureExperts(7, str(worker.manifest_path), 1, "ggml-cpu", "auto")
    assert worker.tell(request, ExpertsMeasured).expert_row_ns > 0
    fault = worker.tell(MeasureExperts(8, str(tmp_path / "nothing"), 1, "ggml-cpu", "auto"), EngineFault)
    assert (fault.request, fault.code) == (8, "model_unusable")


@pytest.mark.parametrize("what", ["manifest", "manifest-bytes", "source", "shard", "layer"])
def test_a_shard_that_cannot_be_loaded_is_a_fault_and_the_old_one_stays(
    serving: Worker, tmp_path: Path, what: str
) -> None:
    holder = serving.connect()
    manifest_path, source_path = serving.manifest_path, serving.source_path
    shard = ShardSet.from_pairs([(0, 1)]).encode()
    damaged = tmp_path / "damaged"
    if what == "manifest":
        manifest_path = tmp_path / "nowhere"
    elif what == "manifest-bytes":
        damaged.write_bytes(b"\x93 nonsense")
        manifest_path = damaged
    elif what == "source":
        data = bytearray(source_path.read_bytes())
        offset, size = serving.manifest.tensor("blk.0.ffn_up_exps.weight").expert_range(1)
        data[offset + size // 2] ^= 1
        damaged.write_bytes(data)
        source_path = damaged
    elif what == "shard":
        shard = b"nonsense"
    else:
        shard = ShardSet.from_pairs([(7, 1)]).encode()
    fault = serving.tell(LoadShard(3, str(manifest_path), str(source_path), shard, 1), EngineFault)
    assert fault.request == 3
    assert fault.detail
    assert ask(holder, [0, 2]) is ReplyCode.OK


def test_dispatches_are_served_and_counted(serving: Worker) -> None:
    holder = serving.connect()
    assert ask(holder, [0, 1, 2]) is ReplyCode.OK
    assert ask(holder, [3]) is ReplyCode.FOREIGN_EXPERT
    assert ask(holder, [0], layer=9) is ReplyCode.UNKNOWN_LAYER
    assert ask(holder, [0], term=0) is ReplyCode.STALE_TERM
    assert ask(holder, [2, 0], layer=1) is ReplyCode.OK
    statistics = serving.statistics()
    assert (statistics["requests"], statistics["rows"], statistics["refusals"]) == (2, 5, 3)
    assert statistics["connections"] == 1
    assert statistics["compute_ns"] > 0


def test_a_new_shard_serves_new_connections_while_the_old_go_on(serving: Worker) -> None:
    """The backbone dials again for it: a session that runs meanwhile is never without a holder."""
    old = serving.connect()
    one_expert = serving.load(3).memory_bytes
    assert ask(old, [0]) is ReplyCode.OK
    assert ask(old, [3]) is ReplyCode.FOREIGN_EXPERT
    new = serving.connect()
    assert ask(new, [3]) is ReplyCode.OK
    assert ask(new, [0]) is ReplyCode.FOREIGN_EXPERT
    assert serving.statistics()["memory_bytes"] > one_expert
    old.close()
    wait_for(lambda: serving.statistics()["memory_bytes"] == one_expert, "the old shard's memory")
    assert ask(new, [3]) is ReplyCode.OK


def test_the_shard_before_the_last_is_given_up_whoever_uses_it(serving: Worker) -> None:
    oldest = serving.connect()
    serving.load(3)
    middle = serving.connect()
    serving.load(1)
    with pytest.raises(OSError, match=r"."):
        ask(oldest, [0])
    assert ask(middle, [3]) is ReplyCode.OK


def test_an_empty_shard_frees_what_was_held_with_its_last_connection(serving: Worker) -> None:
    old = serving.connect()
    assert serving.statistics()["memory_bytes"] > 0
    loaded = serving.load()
    assert (loaded.memory_bytes, loaded.shard_digest) == (0, ShardSet().digest())
    assert ask(serving.connect(), [0]) is not ReplyCode.OK
    assert ask(old, [0]) is ReplyCode.OK
    old.close()
    wait_for(lambda: serving.statistics()["memory_bytes"] == 0, "the old shard's memory")


def test_a_fence_that_moves_ends_old_connections_and_old_openings(serving: Worker) -> None:
    old, late = serving.connect(), serving.dial()
    serving.engine.handle(SetFence(0, 1))  # the same once more changes nothing
    assert ask(old, [0]) is ReplyCode.OK
    token = serving.expect()
    serving.engine.handle(SetFence(0, 2))
    assert is_ended(old.connection)
    assert is_ended(late)
    with pytest.raises(RemoteProtocolError) as caught:
        serving.connect(serving.dial(token), term=1)
    assert caught.value.code == "stale_term"
    assert ask(serving.connect(term=2), [0], term=2) is ReplyCode.OK


def test_a_fence_never_goes_back(serving: Worker) -> None:
    serving.engine.handle(SetFence(1, 0))
    with pytest.raises(LocalProtocolError, match="does not go back"):
        serving.engine.handle(SetFence(0, 9))
    with pytest.raises(RemoteProtocolError):
        serving.connect(term=9)


def test_another_model_is_refused(serving: Worker) -> None:
    opening = Opening(0, 1, b"proof", bytes(32))
    with pytest.raises(RemoteProtocolError) as caught:
        open_remote_holder(NODE, serving.dial(), opening.encode())
    assert caught.value.code == "wrong_model"


def test_without_a_shard_nobody_is_served(worker: Worker) -> None:
    worker.engine.handle(SetFence(0, 1))
    worker.listen()
    with pytest.raises(OSError, match=r"."):
        worker.connect()


# ---- Who gets in ----


def test_a_token_is_good_once(serving: Worker) -> None:
    token = serving.expect()
    holder = serving.connect(serving.dial(token))
    with pytest.raises(OSError, match=r"."):
        serving.connect(serving.dial(token))
    assert ask(holder, [0]) is ReplyCode.OK


def test_tokens_that_were_not_given_or_have_expired_are_not_taken(serving: Worker) -> None:
    for token in (secrets.token_bytes(16), bytes(16), serving.expect(lifetime_ns=-1)):
        with pytest.raises(OSError, match=r"."):
            serving.connect(serving.dial(token))
    assert ask(serving.connect(), [0]) is ReplyCode.OK


def test_a_token_with_another_certificate_is_not_taken(serving: Worker) -> None:
    stranger = make_engine_end()
    with pytest.raises(OSError, match=r"."):
        serving.connect(serving.dial(serving.expect(), stranger))
    # Whoever the token was for has to be given a new one.
    assert ask(serving.connect(), [0]) is ReplyCode.OK
    own = serving.expect(stranger)
    assert ask(serving.connect(serving.dial(own, stranger)), [0]) is ReplyCode.OK


def test_a_backbone_does_not_talk_to_another_worker(serving: Worker) -> None:
    with pytest.raises(RemoteProtocolError, match="another certificate"):
        connect_pinned(
            backbone_end().credentials, HOST, serving.port, serving.expect(), make_engine_end().certificate
        )
    assert ask(serving.connect(), [0]) is ReplyCode.OK


@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(200), bytes(15)],
    ids=["nothing", "http", "tls-without-token", "most-of-a-token"],
)
def test_strangers_are_cut_off(serving: Worker, data: bytes) -> None:
    stranger = serving.raw()
    stranger.sendall(data)
    with contextlib.suppress(OSError):  # it may have been cut off already
        stranger.shutdown(socket.SHUT_WR)
    assert is_ended(stranger)
    assert ask(serving.connect(), [0]) is ReplyCode.OK


def test_a_good_token_and_noise_instead_of_a_handshake_is_cut_off(serving: Worker) -> None:
    stranger = serving.raw()
    stranger.sendall(serving.expect() + b"no handshake at all, but long enough to be read as one")
    assert is_ended(stranger)
    serving.wait(lambda: not serving.engine._connections)


def test_a_token_may_come_in_pieces(serving: Worker) -> None:
    token = serving.expect()
    sock = serving.raw()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for index in range(16):
        sock.sendall(token[index : index + 1])
    context = pinned_context(backbone_end().credentials, worker_end().certificate, server=False)
    connection = context.wrap_socket(sock)
    assert ask(serving.connect(connection), [0]) is ReplyCode.OK
    connection.close()


def test_a_stranger_that_dawdles_is_cut_off(serving: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "HANDSHAKE_TIMEOUT_S", 0.05)
    silent, halfway, stalling = serving.raw(), serving.raw(), serving.raw()
    halfway.sendall(bytes(8))
    stalling.sendall(serving.expect())
    for each in (silent, halfway, stalling):
        assert is_ended(each)


def test_strangers_cannot_keep_the_backbone_out(serving: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STRANGERS_MAX", 3)
    monkeypatch.setattr(engine_module, "HANDSHAKE_TIMEOUT_S", 100.0)  # so that it is not time that ends them
    strangers = [serving.raw() for _ in range(6)]
    for each in strangers[:2]:
        assert is_ended(each)  # the oldest gave way
    assert ask(serving.connect(), [0]) is ReplyCode.OK
    assert len(serving.engine._strangers) <= 3


def test_there_are_only_so_many_connections_and_a_place_comes_free(
    model: tuple[Path, Path, ModelManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "CONNECTIONS_MAX", 2)
    worker = Worker(model)
    try:
        worker.engine.handle(SetFence(0, 1))
        worker.load(0)
        worker.listen()
        first, second = worker.connect(), worker.connect()
        with pytest.raises(OSError, match=r"."):
            worker.connect()
        assert ask(first, [0]) is ask(second, [0]) is ReplyCode.OK
        first.close()
        worker.wait(lambda: len(worker.engine._connections) == 1)
        assert ask(worker.connect(), [0]) is ReplyCode.OK
    finally:
        worker.close()


def test_the_oldest_of_too_many_tokens_gives_way(serving: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "DIALLERS_EXPECTED_MAX", 2)
    first, *_, last = [serving.expect() for _ in range(3)]
    with pytest.raises(OSError, match=r"."):
        serving.connect(serving.dial(first))
    assert ask(serving.connect(serving.dial(last)), [0]) is ReplyCode.OK


# ---- Ending ----


def test_ending_a_connection_keeps_its_encryption() -> None:
    """`SSLSocket.shutdown` drops the TLS object first: a reply sent in that moment would be plaintext."""
    client, server = tls_pair()
    engine_module._shut_down(server)
    assert server.version() == "TLSv1.3"
    with pytest.raises(OSError, match=r"."):
        server.sendall(b"rows")
    assert socket.socket.recv(client, 100) == b""
    client.close()
    server.close()
    engine_module._shut_down(server)  # one that is closed already is no error


def test_closing_ends_connections_strangers_and_the_listener(serving: Worker) -> None:
    holder, stranger = serving.connect(), serving.raw()
    serving.wait(lambda: len(serving.engine._strangers) == 1)
    serving.engine.close()
    assert is_ended(holder.connection)
    assert is_ended(stranger)
    with pytest.raises(ConnectionRefusedError):
        serving.raw()
    serving.wait(lambda: not [each for each in threading.enumerate() if each.name == "accept"])


def test_listening_again_moves_the_port(serving: Worker) -> None:
    before = serving.port
    serving.listen()
    assert ask(serving.connect(), [0]) is ReplyCode.OK
    if serving.port != before:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, before), timeout=20.0)


@pytest.mark.parametrize("host", ["256.0.0.1.invalid", "192.0.2.77", "a" * 200, "bad\0host"])
def test_an_address_that_cannot_be_listened_on_is_a_fault(worker: Worker, host: str) -> None:
    fault = worker.tell(Listen(host, 0), EngineFault)
    assert (fault.code, fault.exit_code) == ("address_unusable", 1)


def test_a_port_that_is_taken_is_said_with_its_exit_status(worker: Worker) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        fault = worker.tell(Listen(HOST, taken.getsockname()[1]), EngineFault)
    assert (fault.code, fault.exit_code) == ("port_in_use", 5)


def test_messages_for_another_role_are_refused(worker: Worker) -> None:
    with pytest.raises(LocalProtocolError, match="SetLease"):
        worker.engine.handle(SetLease(0, 1, 0))
