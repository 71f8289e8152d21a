"""The worker engine: holds a shard, listens for the backbone's data connections, and serves rows.

Control decides what it holds, whom it expects and which (epoch, term) is in force; the engine enforces that
on every connection with its own clock. One thread accepts, one serves each connection, one lock keeps the
kernel to a single computation at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import resource
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvasir_node.engine.channel import ControlChannel, fault_of
from kvasir_node.engine.lease import boottime_ns
from kvasir_node.engine.processor_limit import processors_allowed
from kvasir_node.engine.tls import (
    HANDSHAKE_TIMEOUT_S,
    TOKEN_BYTES,
    EngineCredentials,
    check_pinned,
    pinned_context,
    prepare_socket,
)
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.speed import measure_row_ns
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.manifest_file import read_manifest
from kvasir_node.system_words import in_words
from kvasir_node.telemetry import get_logger
from kvasir_node.worker.connection import BackboneConnection, ServingCounters
from kvasir_proto.audit.reply_chain import Seal, claim_in_seal, sign_seal
from kvasir_proto.dispatch import Opening
from kvasir_proto.errors import KvasirError, LocalProtocolError, PortInUse, RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.limits import as_sentence
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    CertifyKernel,
    ChallengeHolder,
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
    RecomputeRows,
    SetFence,
    ShardLoaded,
)

log = get_logger()

DIALLERS_EXPECTED_MAX: Final = 64
"""Tokens waiting at one time; the oldest gives way."""

CONNECTIONS_MAX: Final = 64
"""Connections with a good token, being shaken hands with or served, at one time."""

STRANGERS_MAX: Final = 64
"""Connections that have not shown a good token yet; the oldest gives way to a newcomer.

Anybody can connect and say nothing. If such connections could fill up the places, they would keep the
backbone out; a backbone shows its token at once.
"""


_EXPECTED_ERRORS: Final = (KvasirError, RemoteProtocolError, LocalProtocolError, OSError, MemoryError)
"""What goes wrong with files, kernels and messages; anything else is a bug."""


@dataclass(eq=False, slots=True)
class _Loaded:
    """A shard in memory, and who is served from it; superseded, it goes with its last connection."""

    kernel: ExpertKernel
    model_digest: bytes
    lock: threading.Lock = field(default_factory=threading.Lock)
    connections: set[socket.socket] = field(default_factory=set)
    is_superseded: bool = False


@dataclass(frozen=True, slots=True)
class _ExpectedDialler:
    node_id: NodeId
    certificate: bytes
    claim_digest: bytes
    expires_boottime_ns: int


class WorkerEngine:
    """Handles control's messages for the worker role. `handle` runs in the engine's main thread."""

    def __init__(self, channel: ControlChannel, credentials: EngineCredentials) -> None:
        self._channel = channel
        self._credentials = credentials
        self._loaded: _Loaded | None = None
        self._superseded: _Loaded | None = None
        """The shard before, as long as a backbone is served from it that has not dialled again."""
        self._loading_lock = threading.Lock()
        """Held while what is loaded changes, or a connection enters or leaves it."""
        self._certifying_lock = threading.Lock()
        self._fence = (0, 0)
        self._expected: dict[bytes, _ExpectedDialler] = {}
        self._expected_lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._strangers: dict[socket.socket, None] = {}
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._stop = threading.Event()
        self._counters = ServingCounters()

    def handle(self, message: EngineMessage) -> None:
        """Act on one message from control; failures go back as `EngineFault`."""
        match message:
            case LoadShard():
                self._load(message)
            case MeasureExperts():
                self._measure(message)
            case CertifyKernel():
                # It takes up to a minute, and control has other questions meanwhile.
                threading.Thread(target=self._certify, args=(message,), name="certify", daemon=True).start()
            case ChallengeHolder():
                threading.Thread(
                    target=self._challenge, args=(message,), name="challenge", daemon=True
                ).start()
            case RecomputeRows():
                threading.Thread(
                    target=self._recompute, args=(message,), name="recompute", daemon=True
                ).start()
            case Listen():
                self._listen(message)
            case ExpectDialler():
                self._expect(message)
            case SetFence():
                self._set_fence((message.epoch, message.term))
            case QueryStatistics():
                self._channel.send(EngineStatistics(message.request, json.dumps(self._statistics())))
            case _:
                raise LocalProtocolError(f"a worker engine has no use for {type(message).__name__}")

    def close(self) -> None:
        """Stop accepting and end every connection."""
        self._stop.set()
        self._stop_listening()
        self._end_connections()
        for stranger in list(self._strangers):
            _shut_down(stranger)

    def _load(self, message: LoadShard) -> None:
        try:
            manifest = read_manifest(Path(message.manifest_path))
            shard = ShardSet.decode(message.shard)
            with ExpertSource(Path(message.source_path), manifest) as source:
                kernel = make_kernel(
                    message.kernel, manifest, shard, source.read, message.threads, message.kernel_device
                )
        except _EXPECTED_ERRORS as error:
            self._channel.send(fault_of(message.request, error, "shard_unusable"))
            return
        self._replace(_Loaded(kernel, manifest.digest()))
        self._channel.send(ShardLoaded(message.request, kernel.memory_bytes, shard.digest()))

    def _measure(self, message: MeasureExperts) -> None:
        try:
            manifest = read_manifest(Path(message.manifest_path))
            row_ns = measure_row_ns(message.kernel, manifest, message.threads, message.kernel_device)
        except _EXPECTED_ERRORS as error:
            self._channel.send(fault_of(message.request, error, "not_measured"))
            return
        allowed = processors_allowed() if message.kernel != "opencl" else None
        if allowed is not None and allowed < message.threads:
            row_ns = round(row_ns * message.threads / allowed)
        self._channel.send(ExpertsMeasured(message.request, row_ns))

    def _certify(self, message: CertifyKernel) -> None:
        from kvasir_node.worker.own_arithmetic import certify  # most engines are never asked

        try:
            with self._certifying_lock:
                answer: EngineMessage = certify(message, self._channel.send)
        except Exception as error:  # a thread that ends in silence leaves control waiting for its deadline
            log.warning("kernel_not_certified", exc_info=not isinstance(error, _EXPECTED_ERRORS))
            answer = fault_of(message.request, error, "not_certified")
        self._channel.send(answer)

    def _challenge(self, message: ChallengeHolder) -> None:
        from kvasir_node.worker.challenge import challenge  # only auditors do

        try:
            with self._certifying_lock:
                answer: EngineMessage = challenge(message, self._credentials)
        except Exception as error:  # a thread that ends in silence leaves control waiting for its deadline
            log.warning("challenge_failed", exc_info=not isinstance(error, _EXPECTED_ERRORS))
            answer = fault_of(message.request, error, "not_challenged")
        self._channel.send(answer)

    def _recompute(self, message: RecomputeRows) -> None:
        from kvasir_node.worker.recomputation import recompute  # only electors do

        try:
            with self._certifying_lock:
                answer: EngineMessage = recompute(message)
        except Exception as error:  # a thread that ends in silence leaves control waiting for its deadline
            log.warning("recomputation_failed", exc_info=not isinstance(error, _EXPECTED_ERRORS))
            answer = fault_of(message.request, error, "not_recomputed")
        self._channel.send(answer)

    def _replace(self, loaded: _Loaded) -> None:
        """Serve new connections from this shard; those of the one before go on until they end.

        It dials again for the new shard, and a session that runs meanwhile must not be without a holder. Of
        the shard before that one connections end now.
        """
        with self._loading_lock:
            oldest, self._superseded, self._loaded = self._superseded, self._loaded, loaded
            if self._superseded is not None:
                self._superseded.is_superseded = True
                self._free_if_unused(self._superseded)
            ending = list(oldest.connections) if oldest is not None else []
        for connection in ending:
            _shut_down(connection)

    def _free_if_unused(self, loaded: _Loaded) -> None:
        """Free a shard that nobody is served from any more. The caller holds the loading lock."""
        if loaded.is_superseded and not loaded.connections:
            with loaded.lock:
                loaded.kernel.close()
            if self._superseded is loaded:
                self._superseded = None

    def _listen(self, message: Listen) -> None:
        self._stop_listening()
        family = socket.AF_INET6 if ":" in message.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            prepare_socket(listener)
            listener.bind((message.host, message.port))
            listener.listen(16)
        except (OSError, ValueError, TypeError) as error:  # the last two: a name that no resolver takes
            listener.close()
            reason = error.strerror if isinstance(error, OSError) else str(error)
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            self._channel.send(
                EngineFault(
                    None,
                    "port_in_use" if taken else "address_unusable",
                    as_sentence(f"data plane cannot listen on {message.host}:{message.port}: {reason}"),
                    PortInUse.exit_code if taken else 1,
                )
            )
            return
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="accept", daemon=True).start()
        self._channel.send(Listening(message.host, listener.getsockname()[1]))

    def _expect(self, message: ExpectDialler) -> None:
        with self._expected_lock:
            while len(self._expected) >= DIALLERS_EXPECTED_MAX:
                self._expected.pop(next(iter(self._expected)))
            self._expected[message.token] = _ExpectedDialler(
                message.node_id, message.certificate, message.claim_digest, message.expires_boottime_ns
            )
        self._channel.send(DiallerExpected(message.token))

    def _set_fence(self, fence: tuple[int, int]) -> None:
        if fence < self._fence:
            raise LocalProtocolError(f"a fence does not go back from {self._fence} to {fence}")
        if fence > self._fence:
            self._fence = fence
            self._end_connections()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if listener is not self._listener:
                    return
                log.warning("accept_failed", reason=in_words(error))
                time.sleep(0.1)  # out of descriptors: give connections time to end
                continue
            self._strangers[sock] = None
            for oldest in list(self._strangers)[:-STRANGERS_MAX]:
                self._strangers.pop(oldest, None)
                _shut_down(oldest)
            try:
                threading.Thread(target=self._serve, args=(sock,), name="connection", daemon=True).start()
            except RuntimeError as error:  # no memory or no right to another thread: others must end first
                self._strangers.pop(sock, None)
                sock.close()
                log.warning("connection_refused", reason=str(error))
                time.sleep(0.1)

    def _serve(self, sock: socket.socket) -> None:
        reason = "internal error"
        node_id: NodeId | None = None
        holds_slot = False
        try:
            expected = self._recognise(sock)
            node_id, certificate = expected.node_id, expected.certificate
            holds_slot = self._slots.acquire(blocking=False)
            if not holds_slot:
                raise RemoteProtocolError("there are too many connections", code="busy")
            context = pinned_context(self._credentials, certificate, server=True)
            # Known before its handshake, so that a moving fence finds it there too.
            connection = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            sock = connection
            self._connections.add(connection)
            connection.do_handshake()
            check_pinned(connection, hashlib.sha256(certificate).digest())
            reason = self._serve_from_shard(connection, expected.claim_digest)
        except (OSError, RemoteProtocolError) as error:
            reason = in_words(error)
        finally:
            self._strangers.pop(sock, None)
            self._connections.discard(sock)
            with contextlib.suppress(OSError):
                sock.close()
            if holds_slot:
                self._slots.release()
            if node_id is None:
                log.info("stranger_refused", reason=reason)
            else:
                log.info("connection_ended", node=node_id, reason=reason)

    def _serve_from_shard(self, connection: ssl.SSLSocket, claim_digest: bytes) -> str:
        """Serve a backbone from the shard that is loaded now, as a node with that claim; why it ended."""
        with self._loading_lock:
            loaded = self._loaded
            if loaded is None:
                raise RemoteProtocolError("no shard is loaded yet", code="not_open")
            loaded.connections.add(connection)
        try:
            return BackboneConnection(
                connection,
                loaded.kernel,
                loaded.lock,
                lambda opening: self._check_opening(opening, loaded.model_digest),
                lambda: self._fence,
                self._counters,
                lambda n_replies, link, programs: sign_seal(
                    Seal(n_replies, link, programs, claim_in_seal(claim_digest), time.time_ns()),
                    loaded.model_digest,
                    self._credentials.sign,
                ),
            ).serve(self._stop)
        finally:
            with self._loading_lock:
                loaded.connections.discard(connection)
                self._free_if_unused(loaded)

    def _recognise(self, sock: socket.socket) -> _ExpectedDialler:
        """Read the one-time token; who it was given to, and the certificate that node's engine must have."""
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
        token = b""
        while len(token) < TOKEN_BYTES:
            part = sock.recv(TOKEN_BYTES - len(token))
            if not part or time.monotonic() > deadline:
                raise ConnectionResetError("no token")
            token += part
        with self._expected_lock:
            expected = self._expected.pop(token, None)
        self._strangers.pop(sock, None)
        if expected is None:
            raise RemoteProtocolError("the token was not expected, or used before", code="bad_token")
        if boottime_ns() > expected.expires_boottime_ns:
            raise RemoteProtocolError("the token has expired", code="bad_token")
        return expected

    def _check_opening(self, opening: Opening, model_digest: bytes) -> None:
        if opening.model_digest != model_digest:
            raise RemoteProtocolError("another model is loaded here", code="wrong_model")
        if (opening.epoch, opening.term) != self._fence:
            raise RemoteProtocolError(
                f"({opening.epoch}, {opening.term}) is not the proven term {self._fence}", code="stale_term"
            )

    def _end_connections(self) -> None:
        for connection in list(self._connections):
            _shut_down(connection)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            _shut_down(listener)  # closing alone does not wake the thread that accepts
            listener.close()

    def _statistics(self) -> dict[str, int]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        with self._loading_lock:
            held = [each for each in (self._loaded, self._superseded) if each is not None]
            memory_bytes = sum(each.kernel.memory_bytes for each in held)
        return {
            **dataclasses.asdict(self._counters),
            "cpu_ns": int((usage.ru_utime + usage.ru_stime) * 1e9),
            "memory_bytes": memory_bytes,
            "connections": len(self._connections),
        }


def _shut_down(sock: socket.socket) -> None:
    """End a connection that another thread is using.

    Not by `ssl.SSLSocket.shutdown`: that takes the encryption away first, and what the other thread sends in
    that moment would leave in the clear.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
