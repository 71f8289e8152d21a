"""Pinned TLS 1.3 on direct TCP connections between engines: contexts, sockets and their options.

Both ends prove one exact certificate that control handed over beforehand; there is no authority and no host
name. Python's blocking ``ssl`` outside trio is four times faster than trio's stream at a layer's 12 KB. The
module refuses to know what is said over a connection.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import socket
import ssl
import tempfile
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from kvasir_proto.errors import RemoteProtocolError

HANDSHAKE_TIMEOUT_S: Final = 10.0
"""Longest wait for a token, a connect or a handshake; a stranger holds a thread no longer than this."""

TOKEN_BYTES: Final = 16
_CONGESTION_CONTROL: Final = b"cubic"


class EngineCredentials:
    """An engine's own certificate and private key as files in a directory that only its user can read.

    ``ssl`` loads key material from files only; they are removed as soon as a context holds them.
    """

    def __init__(self, certificate_pem: bytes, private_key_pem: bytes, directory: Path) -> None:
        self._certificate_pem = certificate_pem
        self._private_key_pem = private_key_pem
        self._directory = directory
        self._private_key: ec.EllipticCurvePrivateKey | None = None

    def sign(self, data: bytes) -> bytes:
        """An ECDSA signature over SHA-256 with the engine's key, as DER."""
        if self._private_key is None:
            key = load_pem_private_key(self._private_key_pem, None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            self._private_key = key
        return self._private_key.sign(data, ec.ECDSA(hashes.SHA256()))

    def load_into(self, context: ssl.SSLContext) -> None:
        """Give ``context`` the certificate and key."""
        # A name of its own: engines of one machine may share the directory and shake hands at the same time.
        with tempfile.NamedTemporaryFile(dir=self._directory, prefix="credentials-", suffix=".pem") as file:
            file.write(self._private_key_pem + self._certificate_pem)
            file.flush()
            context.load_cert_chain(file.name)


def pinned_context(
    credentials: EngineCredentials, remote_certificate_der: bytes, *, server: bool
) -> ssl.SSLContext:
    """A context that shows ``credentials`` and accepts exactly one certificate from the other end."""
    protocol = ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=remote_certificate_der)
    if server:
        context.num_tickets = 0  # a ticket would arrive inside the first reply and be mistaken for it
    credentials.load_into(context)
    return context


def check_pinned(connection: ssl.SSLSocket, remote_certificate_sha256: bytes) -> None:
    """Raise `RemoteProtocolError` unless the other end showed the very certificate that was agreed."""
    shown = connection.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(shown).digest(), remote_certificate_sha256):
        raise _another_certificate()


def _another_certificate() -> RemoteProtocolError:
    return RemoteProtocolError("the other end showed another certificate", code="wrong_certificate")


def prepare_socket(sock: socket.socket) -> None:
    """Set what must be set before ``connect`` or ``listen``.

    BBR estimates bandwidth from our own small bursts and then paces each reply (45 % slower tokens at 20 ms);
    setting the congestion control on an established socket does not undo that. Where the system does not
    offer cubic the default stays.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_CONGESTION"):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION_CONTROL)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EPERM, errno.ENOPROTOOPT):
                raise


def connect_pinned(
    credentials: EngineCredentials,
    host: str,
    port: int,
    token: bytes,
    remote_certificate_der: bytes,
) -> ssl.SSLSocket:
    """Connect, show the one-time token, and complete a mutually pinned handshake.

    Host and certificate come from the other node, so they may be anything. Raises `OSError` (``ssl.SSLError``
    included) or `RemoteProtocolError`; nothing is left open then. The returned socket is blocking with
    `HANDSHAKE_TIMEOUT_S`. In TLS 1.3 a client finishes before the server has judged it: only the first reply
    proves acceptance.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare_socket(sock)
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        context = pinned_context(credentials, remote_certificate_der, server=False)
        sock.connect((host, port))
        sock.sendall(token)
        connection = context.wrap_socket(sock, server_side=False)
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise _another_certificate() from error
    except BaseException as error:
        sock.close()
        if isinstance(error, ValueError | TypeError) and not isinstance(error, OSError):
            # A name that no resolver takes.
            raise RemoteProtocolError(f"{host!r} cannot be dialled: {error}", code="bad_address") from error
        raise
    try:
        check_pinned(connection, hashlib.sha256(remote_certificate_der).digest())
    except BaseException:
        connection.close()
        raise
    return connection
