"""Engine keys and pinned TLS connections inside one process, over a socket pair."""

from __future__ import annotations

import functools
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding

from kvasir_node.engine.certificate import EngineKey
from kvasir_node.engine.tls import EngineCredentials, pinned_context
from kvasir_proto.audit.reply_chain import Seal, claim_in_seal, sign_seal


@dataclass(frozen=True)
class EngineEnd:
    """An engine's key with its certificate, as the other end is told it."""

    credentials: EngineCredentials
    certificate: bytes
    key: bytes


def make_engine_end(bind: Callable[[bytes], bytes] = lambda key: b"no binding") -> EngineEnd:
    """A fresh key and certificate; key files pass through the system's directory for temporary files."""
    key = EngineKey.generate()
    certificate = key.certificate(bind(key.public_der))
    credentials = EngineCredentials(
        certificate.public_bytes(Encoding.PEM), key.private_pem, Path(tempfile.gettempdir())
    )
    return EngineEnd(credentials, certificate.public_bytes(Encoding.DER), key.public_der)


def seals_of(
    end: EngineEnd, model_digest: bytes = bytes(32), claim_digest: bytes = b"", *, ahead_ns: int = 0
) -> Callable[[int, bytes, bytes], bytes]:
    """What a worker's connection signs seals with."""
    claim = claim_in_seal(claim_digest)

    def seal(n_replies: int, link: bytes, told: bytes) -> bytes:
        made = Seal(n_replies, link, told, claim, time.time_ns() + ahead_ns)
        return sign_seal(made, model_digest, end.credentials.sign)

    return seal


def no_seals(n_replies: int, link: bytes, programs: bytes) -> bytes:
    """For a worker that is asked for none."""
    raise AssertionError("nobody asked for a seal")


@functools.cache
def backbone_end() -> EngineEnd:
    """One backbone for all tests of a process: making keys takes time."""
    return make_engine_end()


@functools.cache
def worker_end() -> EngineEnd:
    """One worker for all tests of a process."""
    return make_engine_end()


@functools.cache
def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    backbone, worker = backbone_end(), worker_end()
    return (
        pinned_context(backbone.credentials, worker.certificate, server=False),
        pinned_context(worker.credentials, backbone.certificate, server=True),
    )


def tls_pair() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """A backbone's and a worker's end of one established connection."""
    client_socket, server_socket = socket.socketpair()
    client_context, server_context = _contexts()
    client = client_context.wrap_socket(client_socket, do_handshake_on_connect=False)
    server = server_context.wrap_socket(server_socket, server_side=True, do_handshake_on_connect=False)
    client.setblocking(False)
    server.setblocking(False)
    unfinished = [client, server]
    while unfinished:
        for each in list(unfinished):
            try:
                each.do_handshake()
                unfinished.remove(each)
            except ssl.SSLWantReadError:
                pass
    for each in (client, server):
        each.settimeout(10.0)
    return client, server
