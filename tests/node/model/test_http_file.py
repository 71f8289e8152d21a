"""Ranges over HTTP, whatever a server does: the bytes are those of the file, or there is an error."""

from __future__ import annotations

import contextlib
import datetime
import errno
import http.client
import ipaddress
import itertools
import random
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.model import http_file
from kvasir_node.model.byte_ranges import InOrder
from kvasir_node.model.http_file import REDIRECTS_MAX, HttpFile, HttpPatience, is_public
from kvasir_node.model.model_url import ModelUrl, location_of
from kvasir_proto.errors import SourceFailed, UsageError
from tests.node.model.misbehaving_server import Answering, Behaviour, MisbehavingServer, serving

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

DATA = random.Random(7).randbytes(200_000)

MODEL = {"model": DATA}

IMPATIENT = HttpPatience(connect_s=5, answer_s=5, silence_s=5, delay_first_s=0.001, delay_max_s=0.001)
"""Waits only where a test needs it to; the deadlines are there for a machine with much to do."""


@contextlib.contextmanager
def opened(
    server: MisbehavingServer | ModelUrl, patience: HttpPatience = IMPATIENT, **clocks: Any
) -> Iterator[HttpFile]:
    url = server if isinstance(server, ModelUrl) else server.url("model")
    with contextlib.closing(HttpFile(url, patience, **clocks)) as file:
        yield file


def read(file: HttpFile, begin: int = 0, end: int = len(DATA)) -> bytes:
    return b"".join(file.pieces(begin, end - begin))


def test_every_range_is_the_files() -> None:
    with serving(files=MODEL) as server, opened(server) as file:
        assert file.size_bytes == len(DATA)
        for begin, end in (
            (0, 1),
            (0, len(DATA)),
            (len(DATA) - 1, len(DATA)),
            (1000, 1000),
            (77, 99_999),
        ):
            assert read(file, begin, end) == DATA[begin:end]


def test_a_connection_serves_one_range_after_another() -> None:
    connections = set()

    def note(answering: Answering, begin: int, end: int) -> bool:
        connections.add(answering.client_address)
        return False

    with serving(files=MODEL, behaviour=note) as server, opened(server) as file:
        for begin in range(0, 1000, 100):
            assert read(file, begin, begin + 50) == DATA[begin : begin + 50]
        assert len(connections) == 1


def test_a_connection_that_the_server_closed_between_two_ranges_costs_nothing() -> None:
    def close_after(answering: Answering, begin: int, end: int) -> bool:
        answering.part(DATA, begin, end)
        answering.cut()  # without having said so
        return True

    with (
        serving(files=MODEL, behaviour=close_after) as server,
        opened(server, sleep=_never) as file,
    ):
        assert read(file, 10, 20) == DATA[10:20]
        assert read(file, 30, 40) == DATA[30:40]


def _never(seconds: float) -> None:
    raise AssertionError("it waited")


@settings(max_examples=30, deadline=None)
@given(
    begin=st.integers(0, 4000),
    size_bytes=st.integers(1, 4000),
    cuts=st.lists(st.integers(1, 4000), max_size=20),
)
def test_a_cut_at_any_byte_is_gone_on_from_there(begin: int, size_bytes: int, cuts: list[int]) -> None:
    data, end, left = DATA[:8000], begin + size_bytes, iter(cuts)

    def cut(answering: Answering, first: int, last: int) -> bool:
        if (first, last) == (0, 1):
            return False
        sent = min(next(left, last - first), last - first)
        answering.part(data, first, last, data[first : first + sent])
        answering.cut()
        return True

    with serving(files={"model": data}, behaviour=cut) as server:
        with opened(server) as file:
            assert read(file, begin, end) == data[begin:end]
        asked = server.asked[1:]
        assert asked[0] == (begin, end)
        assert all(last == end for _, last in asked)
        assert server.sent_bytes == 1 + size_bytes, "nothing came twice"


def test_any_number_of_cuts_is_gone_on_from_as_long_as_bytes_come() -> None:
    def cut(answering: Answering, begin: int, end: int) -> bool:
        answering.part(DATA, begin, end, DATA[begin : min(end, begin + 100)])
        answering.cut()
        return True

    with serving(files=MODEL, behaviour=cut) as server, opened(server) as file:
        assert read(file, 0, 100 * 5 * IMPATIENT.attempts_max) == DATA[: 100 * 5 * IMPATIENT.attempts_max]


def lie(**headers: str | None) -> Behaviour:
    """The right bytes under another head, for all but the first request."""

    def behave(answering: Answering, begin: int, end: int) -> bool:
        if len(answering.server.asked) == 1:
            return False
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        answering.part(DATA, begin, end, headers=named)
        return True

    return behave


def status(number: int, **headers: str) -> Behaviour:
    def behave(answering: Answering, begin: int, end: int) -> bool:
        if len(answering.server.asked) == 1:
            return False
        answering.head(number, {"Content-Length": "0"} | {k.replace("_", "-"): v for k, v in headers.items()})
        return True

    return behave


def whole_file(answering: Answering, begin: int, end: int) -> bool:
    if len(answering.server.asked) == 1:
        return False
    answering.head(200, {"Content-Length": str(len(DATA))})
    answering.body(DATA)
    return True


LIES: dict[str, tuple[Behaviour, str]] = {
    "200 instead of 206": (whole_file, "changed, or the server gives no ranges any more"),
    "404": (status(404), "status 404"),
    "403": (status(403), "status 403"),
    "204": (status(204), "status 204"),
    "416": (status(416), "status 416"),
    "no range": (lie(Content_Range=None), "does not say which range"),
    "several ranges": (lie(Content_Range=None, Content_Type="multipart/byteranges"), "does not say which"),
    "a range without a size": (lie(Content_Range="bytes 100-199/*"), "does not say which range"),
    "a range of words": (lie(Content_Range="bytes many"), "does not say which range"),
    "a range further on": (
        lie(Content_Range=f"bytes 101-199/{len(DATA)}"),
        "bytes 101 to 199 for 100",
    ),
    "a range before": (lie(Content_Range=f"bytes 99-199/{len(DATA)}"), "bytes 99 to 199"),
    "a longer range": (lie(Content_Range=f"bytes 100-200/{len(DATA)}"), "bytes 100 to 200"),
    "a range backwards": (lie(Content_Range=f"bytes 100-99/{len(DATA)}"), "bytes 100 to 99"),
    "another size": (lie(Content_Range="bytes 100-199/5000"), "has 5000 bytes now and had 200000"),
    "a huge size": (lie(Content_Range=f"bytes 100-199/{10**17}"), "bytes now and had"),
    "another tag": (lie(ETag='"two"'), "was changed while it was read"),
    "no tag any more": (lie(ETag=None), "was changed while it was read"),
    "encoded": (lie(Content_Encoding="gzip"), "encodes what it sends"),
    "nowhere": (status(302), "leads to no address|leads on more than"),
    "to another protocol": (status(302, Location="ftp://127.0.0.1/model"), "leads to no address"),
    "to a file": (status(302, Location="file:///etc/hosts"), "leads to no address"),
    "with a password": (status(302, Location="http://a:b@127.0.0.1/model"), "leads to no address"),
    "in a circle": (status(302, Location="/model"), f"leads on more than {REDIRECTS_MAX} times"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_lie_ends_the_source_at_once_and_gives_no_byte(case: str) -> None:
    behaviour, reason = LIES[case]
    with serving(files=MODEL, behaviour=behaviour) as server, opened(server, sleep=_never) as file:
        with pytest.raises(SourceFailed, match=reason) as caught:
            read(file, 100, 200)
        assert caught.value.exit_code == 7
        assert str(caught.value).startswith(str(server.url("model")))
        assert len(server.asked) <= 2 + REDIRECTS_MAX


def test_a_server_without_ranges_is_refused_when_it_is_opened() -> None:
    def whole(answering: Answering, begin: int, end: int) -> bool:
        answering.head(200, {"Content-Length": str(len(DATA))})
        return True

    with (
        serving(files=MODEL, behaviour=whole) as server,
        pytest.raises(SourceFailed, match="the whole file"),
    ):
        HttpFile(server.url("model"), IMPATIENT)


def test_a_body_that_is_longer_than_its_range_is_not_read_on() -> None:
    def longer(answering: Answering, begin: int, end: int) -> bool:
        answering.part(DATA, begin, end, DATA[begin:end] + b"more", {"Content-Length": str(end - begin + 4)})
        return True

    with serving(files=MODEL, behaviour=longer) as server, opened(server) as file:
        assert read(file, 10, 20) == DATA[10:20]
        assert read(file, 50, 60) == DATA[50:60]


def test_a_chunked_body_and_a_range_that_is_given_in_parts_are_taken() -> None:
    def chunked(answering: Answering, begin: int, end: int) -> bool:
        end = min(end, begin + 300)  # less than was asked for
        chunks = [DATA[at : min(at + 70, end)] for at in range(begin, end, 70)] + [b""]
        body = b"".join(f"{len(each):x}\r\n".encode() + each + b"\r\n" for each in chunks)
        answering.part(DATA, begin, end, body, {"Content-Length": None, "Transfer-Encoding": "chunked"})
        return True

    with serving(files=MODEL, behaviour=chunked) as server, opened(server) as file:
        assert read(file, 0, 1000) == DATA[:1000]


@pytest.mark.parametrize("number", [429, 500, 502, 503, 504])
def test_a_server_that_is_busy_is_asked_again_after_the_time_that_it_names(number: int) -> None:
    slept: list[float] = []
    answers = iter([status(number, Retry_After="7"), status(number, Retry_After="100000"), status(number)])

    def busy(answering: Answering, begin: int, end: int) -> bool:
        return len(answering.server.asked) > 1 and next(answers, lie())(answering, begin, end)

    with serving(files=MODEL, behaviour=busy) as server, opened(server, sleep=slept.append) as file:
        assert read(file, 5, 50) == DATA[5:50]
        assert slept == [7.0, IMPATIENT.delay_asked_max_s, IMPATIENT.delay_max_s]


def test_a_server_that_gives_nothing_is_given_up_after_some_attempts() -> None:
    with serving(files=MODEL, behaviour=status(503)) as server, opened(server) as file:
        with pytest.raises(SourceFailed, match=r"given up after 6 attempts in a row: .*status 503"):
            read(file)
        assert len(server.asked) == 1 + IMPATIENT.attempts_max


def test_nobody_there_is_said() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = ModelUrl(f"http://127.0.0.1:{unused.getsockname()[1]}/model")
        with pytest.raises(SourceFailed, match="attempts in a row: Connection refused"):
            HttpFile(url, IMPATIENT)


def test_a_connection_that_is_cut_before_the_server_is_known_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever resets at once leaves a socket that is connected to nobody."""
    connected: list[socket.socket] = []
    real = http.client.HTTPConnection.connect

    def cut(connection: http.client.HTTPConnection) -> None:
        real(connection)
        connected.append(connection.sock)
        monkeypatch.setattr(connection, "sock", _Nobody(connection.sock))

    class _Nobody:
        def __init__(self, sock: socket.socket) -> None:
            self.close = sock.close

        def getpeername(self) -> None:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(http.client.HTTPConnection, "connect", cut)
    with serving(files=MODEL) as server, pytest.raises(SourceFailed, match="attempts in a row"):
        opened(server).__enter__()
    assert len(connected) == IMPATIENT.attempts_max
    assert all(each.fileno() == -1 for each in connected)


PUBLIC: dict[str, bool] = {
    "8.8.8.8": True,
    "2606:4700::1111": True,
    "::ffff:8.8.8.8": True,
    "127.0.0.1": False,
    "127.9.9.9": False,
    "0.0.0.0": False,
    "10.1.2.3": False,
    "172.16.0.1": False,
    "192.168.1.1": False,
    "169.254.169.254": False,
    "100.64.0.1": False,
    "224.0.0.1": False,
    "::1": False,
    "::": False,
    "::ffff:127.0.0.1": False,
    "::ffff:10.0.0.1": False,
    "fe80::1%eth0": False,
    "fd00::1": False,
}


@pytest.mark.parametrize("address", PUBLIC)
def test_which_addresses_are_of_the_internet(address: str) -> None:
    assert is_public(address) == PUBLIC[address]


@pytest.mark.parametrize("first_is_public", [True, False])
@pytest.mark.parametrize("second_is_public", [True, False])
def test_a_server_of_the_internet_leads_to_none_of_a_private_network(
    monkeypatch: pytest.MonkeyPatch, first_is_public: bool, second_is_public: bool
) -> None:
    """Neither by a redirect nor, behind the first answer, by another address of the same name."""
    with serving(files=MODEL) as server, serving(files=MODEL) as inner:
        answers = itertools.chain([first_is_public], itertools.repeat(second_is_public))
        monkeypatch.setattr(http_file, "is_public", lambda address: next(answers))

        def redirect(answering: Answering, begin: int, end: int) -> bool:
            answering.head(302, {"Content-Length": "0", "Location": inner.url("model").url})
            return True

        server.behaviour = redirect
        if first_is_public and not second_is_public:
            with pytest.raises(SourceFailed, match=r"leads to 127\.0\.0\.1, which is no address of"):
                HttpFile(server.url("model"), IMPATIENT)
            assert inner.asked == [], "nothing was asked there"
        else:
            with opened(server) as file:
                assert read(file) == DATA


def test_a_redirect_is_followed_at_every_range_and_shown_without_its_query() -> None:
    def lead(answering: Answering, begin: int, end: int) -> bool:
        if answering.path.startswith("/model"):
            answering.head(302, {"Content-Length": "0", "Location": "/elsewhere?secret=1"})
            return True
        assert answering.path == "/elsewhere?secret=1"
        return False

    with (
        serving(files={"model": DATA, "elsewhere": DATA}, behaviour=lead) as server,
        opened(ModelUrl(server.url("model").url + "?key=2")) as file,
    ):
        assert read(file, 100, 1000) == DATA[100:1000]
        assert "key" not in file.name


# -- https ---------------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=10))
        .add_extension(x509.SubjectAlternativeName([address]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    paths = tmp_path / "certificate", tmp_path / "key"
    paths[0].write_bytes(built.public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return paths


def over_tls(server: MisbehavingServer, certificate: tuple[Path, Path]) -> ModelUrl:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return ModelUrl(server.url("model").url.replace("http:", "https:"))


def test_ranges_come_over_tls_from_whom_the_system_trusts(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(files=MODEL) as server:
        url = over_tls(server, certificate)
        with pytest.raises(SourceFailed, match="cannot be used: self-signed certificate"):
            HttpFile(url, IMPATIENT, sleep=_never)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        with opened(url) as file:
            assert read(file) == DATA
        named = ModelUrl(url.url.replace("127.0.0.1", "localhost"))
        with pytest.raises(SourceFailed, match="not valid for 'localhost'"):
            HttpFile(named, IMPATIENT, sleep=_never)


def test_nobody_is_led_from_https_to_http(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    with serving(files=MODEL) as plain, serving(files=MODEL) as server:
        url = over_tls(server, certificate)

        def lead(answering: Answering, begin: int, end: int) -> bool:
            answering.head(302, {"Content-Length": "0", "Location": plain.url("model").url})
            return True

        server.behaviour = lead
        with pytest.raises(SourceFailed, match="leads from https to http"):
            HttpFile(url, IMPATIENT)
        assert plain.asked == []


# -- time ----------------------------------------------------------------------------------------------------


class Clock:
    """A clock that goes on by a step whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self._times = itertools.count()
        self._step_s = step_s

    def __call__(self) -> float:
        return next(self._times) * self._step_s


def test_a_drip_below_the_floor_is_given_up_however_steady_it_is() -> None:
    """Each piece comes well before the silence would be too long."""

    def drip(answering: Answering, begin: int, end: int) -> bool:
        answering.part(DATA, begin, end, b"")
        for each in DATA[begin:end]:
            answering.body(bytes([each]))
        return True

    patience = replace(IMPATIENT, answer_s=1e6, silence_s=1e6, connect_s=5, bytes_per_second_min=100_000)
    with (
        serving(files=MODEL, behaviour=drip) as server,
        opened(server, patience, now=Clock(1.0)) as file,
        pytest.raises(SourceFailed, match="less than 100000 bytes a second came for 30 s"),
    ):
        read(file)


def raw_server(serve: Callable[[socket.socket], None]) -> tuple[ModelUrl, Callable[[], None]]:
    """A server that says what it wants; returns its address and what ends it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(65536)
                    serve(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()

    def end() -> None:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)

    return ModelUrl(f"http://127.0.0.1:{listener.getsockname()[1]}/model"), end


def one_header_line_for_ever(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 206 Partial Content\r\nX: ")
    while True:
        connection.sendall(b"x")
        connection.recv(0)
        threading.Event().wait(0.01)


def continue_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        threading.Event().wait(0.01)


def silence(connection: socket.socket) -> None:
    connection.recv(1)


@pytest.mark.parametrize("serve", [one_header_line_for_ever, continue_for_ever, silence])
def test_an_answers_head_has_one_deadline_however_steadily_it_comes(
    serve: Callable[[socket.socket], None],
) -> None:
    url, end = raw_server(serve)
    try:
        with pytest.raises(SourceFailed, match="after 2 attempts in a row: the server is too slow"):
            HttpFile(url, replace(IMPATIENT, answer_s=0.15, attempts_max=2))
    finally:
        end()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 206 ok\r\n" + b"A: b\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 206 ok\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 206 ok\r\nContent-Range: bytes 0-0/9\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_costs_an_error(answer: bytes) -> None:
    url, end = raw_server(lambda connection: connection.sendall(answer))
    try:
        with pytest.raises(SourceFailed):
            HttpFile(url, IMPATIENT)
    finally:
        end()


def test_a_chunk_of_negative_size_gives_no_more_than_was_asked_for() -> None:
    head = b"HTTP/1.1 206 ok\r\nContent-Range: bytes 0-0/9\r\nTransfer-Encoding: chunked\r\n\r\n"
    url, end = raw_server(lambda connection: connection.sendall(head + b"-5\r\nabc"))
    try:
        with opened(url) as file:
            assert read(file, 0, 1) == b"a"
    finally:
        end()


# -- addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "http://",
        "http:///model.gguf",
        "http://host",
        "http://host/",
        "http://host/a/",
        "http://user@host/model.gguf",
        "http://user:hunter2@host/model.gguf",
        "http://host:99999/model.gguf",
        "http://host/a b.gguf",
        "http://host/a\n.gguf",
        "http://[::1/model.gguf",
        "http://host/\N{LATIN SMALL LETTER E WITH ACUTE}.gguf",
        "http://host/" + "x" * 3000,
    ],
)
def test_an_address_that_is_not_taken_is_a_wrong_call(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        location_of(text)
    assert "hunter2" not in str(caught.value)


def test_parts_lie_beside_each_other_with_the_same_query() -> None:
    url = location_of("HTTPS://host/dir/m-00001-of-00002.gguf?key=1")
    assert isinstance(url, ModelUrl)
    assert (url.name, url.stem) == ("m-00001-of-00002.gguf", "m-00001-of-00002")
    assert url.with_name("m 2.gguf").url == "https://host/dir/m%202.gguf?key=1"
    assert str(url).endswith("dir/m-00001-of-00002.gguf")


# -- in order ------------------------------------------------------------------------------------------------


class Sized:
    """A source of `DATA` in pieces of a given size."""

    name = "sized"
    size_bytes = len(DATA)

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes

    def pieces(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        for at in range(offset, offset + size_bytes, self._piece_bytes):
            yield DATA[at : min(at + self._piece_bytes, offset + size_bytes)]

    def close(self) -> None:
        pass


@given(
    piece_bytes=st.integers(1, 50),
    ranges=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=12),
    begin=st.integers(0, 30),
)
def test_ranges_in_order_are_the_same_bytes_as_one_by_one(
    piece_bytes: int, ranges: list[tuple[int, int]], begin: int
) -> None:
    end = begin + sum(gap + size_bytes for gap, size_bytes in ranges)
    source = InOrder(Sized(piece_bytes), begin, end)
    at = begin
    for gap, size_bytes in ranges:
        at += gap
        assert b"".join(source.pieces(at, size_bytes)) == DATA[at : at + size_bytes]
        at += size_bytes
