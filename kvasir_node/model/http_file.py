"""A model file on an HTTP(S) server that gives ranges, as a source of bytes.

Decides what of an answer is believed (only status 206 with the very range, size and version asked for), when
a cut is gone on from and when a server is given up: every wait has a deadline, however few bytes a server
lets through at a time. A server of the internet leads to none of a private network: what is asked for there
is asked in our name. Of the standard library, because the libraries at hand bound each read of a socket,
but not an answer. It runs in a thread; what the bytes are worth, digests say.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, cast
from urllib.parse import urljoin, urlsplit

from kvasir_node import __version__
from kvasir_node.backoff import retry_delay_s
from kvasir_node.model.byte_ranges import PIECE_SIZE_BYTES
from kvasir_node.model.model_url import ModelUrl
from kvasir_node.system_words import in_words
from kvasir_proto.errors import LocalProtocolError, SourceFailed, UsageError
from kvasir_proto.manifest import FILE_SIZE_BYTES_MAX

REDIRECTS_MAX: Final = 5

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_TRY_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.ASCII)
_SECONDS: Final = re.compile(r"[0-9]{1,6}", re.ASCII)
_VERSION_LENGTH_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class HttpPatience:
    """How long a server is waited for.

    ``answer_s`` is from the request to the end of the answer's head, redirects and connecting included;
    ``silence_s`` without any byte of a body. Below ``bytes_per_second_min``, over ``window_s``, a server is
    given up; so it is after ``attempts_max`` attempts in a row that gave no byte.
    """

    connect_s: float = 10.0
    answer_s: float = 30.0
    silence_s: float = 20.0
    window_s: float = 30.0
    bytes_per_second_min: int = 1024
    attempts_max: int = 6
    delay_first_s: float = 0.5
    delay_max_s: float = 8.0
    delay_asked_max_s: float = 60.0
    """Of what a server asks us to wait (`Retry-After`), this much is granted."""


class _Interrupted(Exception):
    """An attempt ended before all its bytes came; another one may go on there."""

    def __init__(self, reason: str, delay_s: float | None = None) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


class HttpFile:
    """The file at one address. Raises `SourceFailed` when the server does not give it in ranges.

    Threads may share one. ``now`` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        location: ModelUrl,
        patience: HttpPatience | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.name = str(location)
        self._url = location.url
        self._patience = patience or HttpPatience()
        self._now = now
        self._sleep = sleep
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._idle_lock = threading.Lock()
        self._is_closed = False
        self._is_public: bool | None = None
        """Whether the first server of all is one of the internet."""
        self._version: str | None = None
        self._version_is_strong = False
        self.size_bytes = 0
        for _ in self._attempts(0, 1):
            pass

    def pieces(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """The bytes of one range (see `ByteRanges`)."""
        if size_bytes and not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise SourceFailed(f"{self.name} is cut short: it ends at byte {self.size_bytes}")
        return self._attempts(offset, offset + size_bytes)

    @property
    def version(self) -> str:
        """What the server calls these bytes (see `ByteRanges`); a weak tag may call others so too."""
        version = self._version or ""
        return "" if version.startswith("W/") else version

    def close(self) -> None:
        """Close every connection. Idempotent."""
        with self._idle_lock:
            self._is_closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for each in connections:
                each.close()

    # -- attempts ----------------------------------------------------------------------------------

    def _attempts(self, offset: int, end: int) -> Iterator[bytes]:
        """The bytes from `offset` to `end`, gone on with after each cut at the byte it came at."""
        patience = self._patience
        pace = _Pace(patience, self._now)
        failures = 0
        while offset < end:
            coming = self._attempt(offset, end)
            try:
                while True:
                    with pace.waiting():
                        piece = next(coming, b"")
                    if not piece:
                        break
                    offset += len(piece)
                    failures = 0
                    if pace.is_too_slow(len(piece)):
                        raise SourceFailed(
                            f"{self.name} is given up: less than {patience.bytes_per_second_min} bytes a "
                            f"second came for {patience.window_s:g} s"
                        )
                    yield piece
                if offset < end:
                    raise _Interrupted("the answer ended too early")
            except _Interrupted as error:
                failures += 1
                if failures >= patience.attempts_max:
                    raise SourceFailed(
                        f"{self.name} is given up after {failures} attempts in a row: {error}"
                    ) from error
                delay_s = retry_delay_s(failures, patience.delay_first_s, patience.delay_max_s)
                with pace.waiting():
                    self._sleep(delay_s if error.delay_s is None else error.delay_s)
            finally:
                coming.close()

    def _attempt(self, offset: int, end: int) -> Generator[bytes]:
        """What one answer gives of these bytes. Raises `_Interrupted` for what may pass."""
        exchange = self._ask(offset, end)
        left = exchange.size_bytes
        try:
            while left:
                exchange.expect_within(self._patience.silence_s)
                try:
                    piece = exchange.response.read1(min(left, PIECE_SIZE_BYTES))
                except (OSError, http.client.HTTPException, ValueError) as error:
                    raise _Interrupted(_reason_of(error)) from error
                if not piece:
                    return
                piece = piece[:left]  # a chunk of negative size is read to its end
                left -= len(piece)
                yield piece
        finally:
            self._release(exchange, is_whole=not left)

    # -- one answer --------------------------------------------------------------------------------

    def _ask(self, offset: int, end: int) -> _Exchange:
        """An answer that is good for the bytes from `offset` on, its body not read yet."""
        deadline = self._now() + self._patience.answer_s
        url = self._url
        for _ in range(1 + REDIRECTS_MAX):
            exchange = self._exchange(url, offset, end, deadline)
            try:
                target = self._redirect_of(exchange.response, url)
                if target is None:
                    exchange.size_bytes = self._checked(exchange.response, offset, end)
                    return exchange
            except BaseException:
                self._release(exchange, is_whole=False)
                raise
            self._release(exchange, is_whole=False)
            url = target
        raise SourceFailed(f"{self.name} cannot be used: it leads on more than {REDIRECTS_MAX} times")

    def _exchange(self, url: str, offset: int, end: int, deadline: float) -> _Exchange:
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {
            "Range": f"bytes={offset}-{end - 1}",
            "Accept-Encoding": "identity",
            "User-Agent": f"kvasir/{__version__}",
        }
        if self._version is not None and self._version_is_strong:
            headers["If-Range"] = self._version
        key = (parts.scheme, parts.netloc)
        while True:
            kept = self._take_idle(key)
            connection = kept or self._connected(parts.scheme, parts.netloc, deadline)
            timed = cast(_TimedSocket, connection.sock)
            timed.deadline = deadline
            try:
                timed.arm()
                connection.request("GET", target, headers=headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                if kept is not None and not isinstance(error, TimeoutError):
                    continue  # the server has closed it meanwhile, as it may
                raise _Interrupted(_reason_of(error)) from error
            except BaseException:
                connection.close()
                raise
            return _Exchange(key, connection, response, timed, self._now)

    def _connected(self, scheme: str, netloc: str, deadline: float) -> http.client.HTTPConnection:
        left_s = max(0.001, min(self._patience.connect_s, deadline - self._now()))
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        try:
            connection = kind(netloc, timeout=left_s)
        except (http.client.HTTPException, ValueError) as error:
            raise _Interrupted(_reason_of(error)) from error
        try:
            connection.connect()
            address = str(connection.sock.getpeername()[0])
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise SourceFailed(f"{self.name} cannot be used: {error.verify_message}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()  # connected or not: a server may cut it before it is asked who it is
            raise _Interrupted(_reason_of(error)) from error
        if self._is_public is None:
            self._is_public = is_public(address)
        elif self._is_public and not is_public(address):
            connection.close()
            raise self._unusable(f"it leads to {address}, which is no address of the internet")
        connection.sock = cast(Any, _TimedSocket(connection.sock, self._now))
        return connection

    def _redirect_of(self, response: http.client.HTTPResponse, url: str) -> str | None:
        """Where the answer sends us, None where it is the answer itself."""
        if response.status not in _REDIRECTS:
            return None
        try:
            target = ModelUrl(urljoin(url, response.getheader("Location") or "")).url
        except (UsageError, ValueError) as error:
            raise SourceFailed(f"{self.name} cannot be used: it leads to no address: {error}") from error
        if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
            raise SourceFailed(f"{self.name} cannot be used: it leads from https to http")
        return target

    def _checked(self, response: http.client.HTTPResponse, offset: int, end: int) -> int:
        """How many bytes from `offset` on the answer has. Raises for all but the very bytes asked for."""
        status = response.status
        if status in _TRY_AGAIN:
            asked = response.getheader("Retry-After") or ""
            delay_s = (
                min(float(asked), self._patience.delay_asked_max_s) if _SECONDS.fullmatch(asked) else None
            )
            raise _Interrupted(f"the server answers with status {status}", delay_s)
        if status == 200:
            if self._version is not None and self._version_is_strong:
                raise self._unusable("the file was changed, or the server gives no ranges any more")
            raise self._unusable("the server gives the whole file where a range was asked for")
        if status != 206:
            raise self._unusable(f"the server answers with status {status}")
        if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
            raise self._unusable("the server encodes what it sends")
        match = _CONTENT_RANGE.fullmatch((response.getheader("Content-Range") or "").strip())
        if match is None:
            raise self._unusable("the server does not say which range it sends")
        first, last, size_bytes = (int(each) for each in match.groups())
        if not offset == first <= last < min(end, size_bytes):
            raise self._unusable(f"the server sends bytes {first} to {last} for {offset} to {end - 1}")
        if not size_bytes <= FILE_SIZE_BYTES_MAX or (self.size_bytes and size_bytes != self.size_bytes):
            raise self._unusable(f"the file has {size_bytes} bytes now and had {self.size_bytes}")
        self._check_version(response)
        self.size_bytes = size_bytes
        return last + 1 - first

    def _check_version(self, response: http.client.HTTPResponse) -> None:
        tag = response.getheader("ETag")
        version = (tag or response.getheader("Last-Modified") or "")[:_VERSION_LENGTH_MAX]
        if self._version is None:
            self._version = version
            self._version_is_strong = tag is not None and tag.startswith('"') and tag.isprintable()
        elif version != self._version:
            raise self._unusable("the file was changed while it was read")

    def _unusable(self, reason: str) -> SourceFailed:
        return SourceFailed(f"{self.name} cannot be used: {reason}")

    # -- connections -------------------------------------------------------------------------------

    def _take_idle(self, key: tuple[str, str]) -> http.client.HTTPConnection | None:
        with self._idle_lock:
            if self._is_closed:
                raise LocalProtocolError("the model's bytes are closed")
            idle = self._idle.get(key)
            return idle.pop() if idle else None

    def _release(self, exchange: _Exchange, is_whole: bool) -> None:
        """Keep the connection for the next range, where this answer ended as it should."""
        response = exchange.response
        if is_whole and not response.will_close:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                response.read1(1)  # a chunked answer's last chunk
            if response.length == 0 or response.isclosed():
                response.close()
                with self._idle_lock:
                    kept = self._idle.setdefault(exchange.key, [])
                    if not self._is_closed and not kept:
                        kept.append(exchange.connection)
                        return
        response.close()
        exchange.connection.close()


class _Exchange:
    """A request's answer: head read, body to come; `size_bytes` of it are wanted."""

    def __init__(
        self,
        key: tuple[str, str],
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        timed: _TimedSocket,
        now: Callable[[], float],
    ) -> None:
        self.key = key
        self.connection = connection
        self.response = response
        self.size_bytes = 0
        self._timed = timed
        self._now = now

    def expect_within(self, seconds: float) -> None:
        """The next bytes are to come within this time."""
        self._timed.deadline = self._now() + seconds


class _TimedSocket:
    """A connected socket whose reads have one deadline together: as much of one as `http.client` uses."""

    def __init__(self, raw: socket.socket, now: Callable[[], float]) -> None:
        self._raw = raw
        self._now = now
        self.deadline = now()

    def arm(self) -> None:
        """Let the next call wait until the deadline. Raises `TimeoutError` when that has passed."""
        left_s = self.deadline - self._now()
        if left_s <= 0:
            raise TimeoutError("the server is too slow")
        self._raw.settimeout(left_s)

    def makefile(self, mode: Literal["rb"]) -> io.BufferedReader:
        """What an answer is read from."""
        return io.BufferedReader(_TimedFile(self._raw.makefile(mode, buffering=0), self), 1 << 16)

    def sendall(self, data: bytes) -> None:
        """Send a request: less than a socket's buffer holds."""
        self._raw.sendall(data)

    def close(self) -> None:
        """Close the socket, once nothing is read from it any more."""
        self._raw.close()


class _TimedFile(io.RawIOBase):
    """Reads of a `_TimedSocket`."""

    def __init__(self, file: Any, timed: _TimedSocket) -> None:
        self._file = file
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._timed.arm()
        return cast("int | None", self._file.readinto(buffer))

    def close(self) -> None:
        self._file.close()
        super().close()


class _Pace:
    """How fast bytes come, over the time that is spent waiting for them."""

    def __init__(self, patience: HttpPatience, now: Callable[[], float]) -> None:
        self._patience = patience
        self._now = now
        self._waited_s = 0.0
        self._bytes = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What passes inside is time that the server takes."""
        begin = self._now()
        try:
            yield
        finally:
            self._waited_s += self._now() - begin

    def is_too_slow(self, size_bytes: int) -> bool:
        """Note that so many bytes came; whether too few have in the last window."""
        self._bytes += size_bytes
        if self._waited_s < self._patience.window_s:
            return False
        too_slow = self._bytes < self._patience.bytes_per_second_min * self._waited_s
        self._waited_s, self._bytes = 0.0, 0
        return too_slow


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet: not of this machine, its link or a private network."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return ip.is_global and not ip.is_multicast


def _reason_of(error: Exception) -> str:
    """A failure of the network in a sentence's words."""
    if isinstance(error, TimeoutError):
        return "the server is too slow"
    if isinstance(error, OSError):
        return in_words(error)
    return f"the server's answer is not HTTP ({type(error).__name__})"
