"""Pinned TLS: exactly one certificate at either end, TLS 1.3, nothing left behind on disk or open."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from kvasir_node.engine import tls
from kvasir_node.engine.certificate import EngineKey
from kvasir_node.engine.tls import (
    EngineCredentials,
    check_pinned,
    connect_pinned,
    pinned_context,
    prepare_socket,
)
from kvasir_proto.errors import RemoteProtocolError
from tests.node.tls_ends import EngineEnd, backbone_end, make_engine_end, tls_pair, worker_end

TOKEN = bytes(range(16))


class Listener:
    """A server on loopback that takes one connection and does `act` with it, in a thread."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(10.0)
        self.port = self._socket.getsockname()[1]
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(act,))
        self._thread.start()

    def _run(self, act: Callable[[socket.socket], None]) -> None:
        try:
            connection, _ = self._socket.accept()
            connection.settimeout(10.0)
            with connection:
                act(connection)
        except OSError as error:
            self.failure = error

    def close(self) -> None:
        self._thread.join(10.0)
        self._socket.close()
        assert not self._thread.is_alive()


@pytest.fixture
def listener() -> Iterator[Callable[[Callable[[socket.socket], None]], Listener]]:
    made: list[Listener] = []

    def make(act: Callable[[socket.socket], None]) -> Listener:
        made.append(Listener(act))
        return made[-1]

    yield make
    for each in made:
        each.close()


MakeListener = Callable[[Callable[[socket.socket], None]], Listener]


def as_worker(end: EngineEnd, expected: EngineEnd, tokens: list[bytes]) -> Callable[[socket.socket], None]:
    """Take the token, shake hands, say hello."""

    def act(sock: socket.socket) -> None:
        tokens.append(sock.recv(16, socket.MSG_WAITALL))
        context = pinned_context(end.credentials, expected.certificate, server=True)
        with context.wrap_socket(sock, server_side=True) as connection:
            check_pinned(connection, hashlib.sha256(expected.certificate).digest())
            connection.sendall(b"hello")
            connection.recv(1)

    return act


def test_both_ends_are_pinned_and_the_token_goes_first(listener: MakeListener) -> None:
    tokens: list[bytes] = []
    server = listener(as_worker(worker_end(), backbone_end(), tokens))
    connection = connect_pinned(
        backbone_end().credentials, "127.0.0.1", server.port, TOKEN, worker_end().certificate
    )
    assert connection.recv(5) == b"hello"
    assert tokens == [TOKEN]
    assert connection.version() == "TLSv1.3"
    assert connection.getpeercert(binary_form=True) == worker_end().certificate
    connection.close()
    assert server.failure is None


def test_a_server_with_another_certificate_is_refused(listener: MakeListener) -> None:
    server = listener(as_worker(make_engine_end(), backbone_end(), []))
    with pytest.raises(RemoteProtocolError) as caught:
        connect_pinned(backbone_end().credentials, "127.0.0.1", server.port, TOKEN, worker_end().certificate)
    assert caught.value.code == "wrong_certificate"


def test_a_client_with_another_certificate_is_refused(listener: MakeListener) -> None:
    server = listener(as_worker(worker_end(), backbone_end(), []))
    connection = connect_pinned(
        make_engine_end().credentials, "127.0.0.1", server.port, TOKEN, worker_end().certificate
    )
    # In TLS 1.3 the client finishes first: only a reply proves that it was accepted.
    received = b""
    with contextlib.suppress(OSError):
        received = connection.recv(5)
    assert received == b""
    connection.close()
    server.close()
    assert isinstance(server.failure, ssl.SSLError)


def test_a_client_without_a_certificate_is_refused() -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=worker_end().certificate)
    assert "certificate" in failure_of_server(bare)


def test_an_older_tls_is_refused() -> None:
    old = pinned_context(backbone_end().credentials, worker_end().certificate, server=False)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert failure_of_server(old)


def failure_of_server(client_context: ssl.SSLContext) -> str:
    """What a pinned server's handshake fails with against that client."""
    client_socket, server_socket = socket.socketpair()
    server_context = pinned_context(worker_end().credentials, backbone_end().certificate, server=True)
    client = client_context.wrap_socket(client_socket, do_handshake_on_connect=False)
    server = server_context.wrap_socket(server_socket, server_side=True, do_handshake_on_connect=False)
    client.setblocking(False)
    server.setblocking(False)
    client_is_done = False
    try:
        for _ in range(1000):
            if not client_is_done:
                try:
                    client.do_handshake()
                    client_is_done = True
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError:
                    client_is_done = True
            try:
                server.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return str(error)
            return ""
        raise AssertionError("the handshake does not end")
    finally:
        client.close()
        server.close()


def test_no_session_ticket_precedes_the_first_reply() -> None:
    """It would make the socket readable with nothing to read in it."""
    client, server = tls_pair()
    client.setblocking(False)
    with pytest.raises(BlockingIOError):
        socket.socket.recv(client, 1)
    assert client.session is None or not client.session.has_ticket
    client.close()
    server.close()


def test_another_certificate_of_the_same_key_is_not_the_agreed_one() -> None:
    client, server = tls_pair()
    with pytest.raises(RemoteProtocolError) as caught:
        check_pinned(client, hashlib.sha256(backbone_end().certificate).digest())
    assert caught.value.code == "wrong_certificate"
    check_pinned(client, hashlib.sha256(worker_end().certificate).digest())
    client.close()
    server.close()


def test_key_files_are_private_and_do_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = EngineKey.generate()
    pem = key.certificate(b"").public_bytes(Encoding.PEM)
    credentials = EngineCredentials(pem, key.private_pem, tmp_path)
    seen: list[tuple[int, bytes]] = []

    class Watched(ssl.SSLContext):
        def load_cert_chain(self, certfile: str, *others: object) -> None:  # type: ignore[override]
            path = Path(certfile)
            seen.append((path.stat().st_mode & 0o777, path.read_bytes()))
            super().load_cert_chain(certfile)

    credentials.load_into(Watched(ssl.PROTOCOL_TLS_SERVER))
    assert seen == [(0o600, key.private_pem + pem)]
    assert list(tmp_path.iterdir()) == []


def test_engines_that_share_a_directory_do_not_meet_in_it(tmp_path: Path) -> None:
    ends = []
    for _ in range(4):
        key = EngineKey.generate()
        certificate = key.certificate(b"")
        ends.append(EngineCredentials(certificate.public_bytes(Encoding.PEM), key.private_pem, tmp_path))
    failures: list[BaseException] = []

    def load(credentials: EngineCredentials) -> None:
        try:
            for _ in range(20):
                credentials.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(each,)) for each in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert failures == []


# ---- What another node may say about itself ----


@pytest.mark.parametrize("host", ["bad\0host", "a" * 300, "..", "\udcff"])
def test_a_host_that_is_no_host_is_a_protocol_error(host: str) -> None:
    with pytest.raises((RemoteProtocolError, OSError)) as caught:
        connect_pinned(backbone_end().credentials, host, 1, TOKEN, worker_end().certificate)
    if isinstance(caught.value, RemoteProtocolError):
        assert caught.value.code == "bad_address"


@pytest.mark.parametrize("certificate", [b"", b"\0", b"no certificate", b"\x30\x82" + bytes(300)])
def test_a_certificate_that_is_none_is_refused_before_anybody_is_dialled(
    listener: MakeListener, certificate: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises((RemoteProtocolError, OSError)):
            connect_pinned(
                backbone_end().credentials, "127.0.0.1", server.getsockname()[1], TOKEN, certificate
            )
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_where_nobody_listens_is_an_os_error(host: str) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with pytest.raises(OSError, match=r"."):
            connect_pinned(backbone_end().credentials, host, port, TOKEN, worker_end().certificate)


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH_9.6\r\n", bytes(100), b"\x15\x03\x03\x00\x02\x02\x28"]
)
def test_a_server_that_speaks_something_else_is_an_os_error(listener: MakeListener, answer: bytes) -> None:
    def act(sock: socket.socket) -> None:
        sock.recv(16)
        sock.sendall(answer)

    server = listener(act)
    with pytest.raises(OSError, match=r"."):
        connect_pinned(backbone_end().credentials, "127.0.0.1", server.port, TOKEN, worker_end().certificate)


def test_a_server_that_says_nothing_is_given_up(
    listener: MakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT_S", 0.1)
    is_over = threading.Event()
    server = listener(lambda _: assert_true(is_over.wait(10.0)))
    with pytest.raises(TimeoutError):
        connect_pinned(backbone_end().credentials, "127.0.0.1", server.port, TOKEN, worker_end().certificate)
    is_over.set()


def assert_true(value: bool) -> None:
    assert value


def test_sockets_are_prepared_before_they_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        prepare_socket(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
        if available.exists() and "cubic" in available.read_text().split():
            name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"cubic"
        monkeypatch.setattr(tls, "_CONGESTION_CONTROL", b"no-such-one")
        prepare_socket(sock)  # a system without it keeps its default
