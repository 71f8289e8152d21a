"""What an engine process does, once `kvasir_node.engine.__main__` has made it deaf to Ctrl-C.

Control starts it with one end of a socket pair and is the only one to talk to it there; the end of that
stream ends the process at once, so an engine cannot outlive its node. An abort inside ggml costs this
process and never the node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Final, Protocol

from cryptography.hazmat.primitives.serialization import Encoding

from kvasir_node import native_library
from kvasir_node.engine.certificate import EngineKey
from kvasir_node.engine.channel import ControlChannel, fault_of
from kvasir_node.engine.llama_log import capture_llama_log, tell_abort
from kvasir_node.engine.tls import EngineCredentials
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.telemetry import bind_process, configure_telemetry
from kvasir_proto.errors import KvasirError, LocalProtocolError, ModelAborted, ProtocolError
from kvasir_proto.messages.engine import (
    EngineCertificate,
    EngineHello,
    EngineIdentity,
    EngineMessage,
    Shutdown,
)

ORPHAN_GRACE_S: Final = 1.0
"""How long an engine without control may take to end in good order."""


class RoleEngine(Protocol):
    """What an engine does in its role."""

    def handle(self, message: EngineMessage) -> None:
        """Act on one message from control."""

    def close(self) -> None:
        """End in good order, within a bounded time."""


def _make_role_engine(role: str, channel: ControlChannel, credentials: EngineCredentials) -> RoleEngine:
    # Each role imports what only it needs: a worker has no use for llama.cpp's context, nor its memory.
    if role == "worker":
        from kvasir_node.worker.engine import WorkerEngine

        return WorkerEngine(channel, credentials)
    from kvasir_node.backbone.engine import BackboneEngine

    return BackboneEngine(channel, credentials)


def _serve(role: str, channel: ControlChannel, directory: Path) -> None:
    native_library.self_check()
    capture_llama_log()
    tell_abort(lambda reason: channel.send(fault_of(None, ModelAborted(reason), "aborted")))
    key = EngineKey.generate()
    channel.send(EngineHello(key.public_der, os.getpid(), GgmlCpuKernel.backend))
    identity = channel.receive()
    if identity is None:
        return
    if not isinstance(identity, EngineIdentity):
        raise LocalProtocolError("control must say first who its engine is")
    if identity.role != role:
        raise LocalProtocolError(f"started as a {role}, and told to be a {identity.role}")
    bind_process(node=identity.node_id)
    certificate = key.certificate(identity.binding)
    credentials = EngineCredentials(certificate.public_bytes(Encoding.PEM), key.private_pem, directory)
    compute_in_batch()
    engine = _make_role_engine(role, channel, credentials)
    channel.send(EngineCertificate(certificate.public_bytes(Encoding.DER)))
    try:
        while (message := channel.receive()) is not None and not isinstance(message, Shutdown):
            try:
                engine.handle(message)
            except ProtocolError as error:
                channel.send(fault_of(None, error, "protocol"))
    finally:
        engine.close()


def compute_in_batch() -> None:
    """Tell Linux that this process computes and waits: waking up, it preempts nobody.

    A worker that a request wakes would otherwise take the processor from the backbone that is still sending
    to the others, a backbone that the first record of a reply wakes from the worker that is still sending the
    rest, and either from whatever its owner is doing. Threads started later inherit it.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a container may forbid it; then all is as it was
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _exit_without_control(descriptor: int) -> None:
    """Wait until control's end is closed, then end this process, whatever its main thread sits in.

    The main thread notices by itself unless it is busy: loading a shard takes minutes, reading a file on a
    dead network mount for ever.
    """
    waiter = select.poll()
    waiter.register(descriptor, 0)  # a hang-up is reported without being asked for
    waiter.poll()
    time.sleep(ORPHAN_GRACE_S)
    os._exit(KvasirError.exit_code)


def main(arguments: list[str]) -> int:
    """Run an engine until control ends it; the exit status is the error's own."""
    parser = argparse.ArgumentParser(prog="python -m kvasir_node.engine")
    parser.add_argument("--role", choices=("backbone", "worker"), required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="warning")
    parser.add_argument("--log-format", choices=("console", "json"), default="console")
    options = parser.parse_args(arguments)
    configure_telemetry(options.log_level, options.log_format, os.environ)
    bind_process(role=options.role)
    channel = ControlChannel(socket.socket(fileno=options.control_fd))
    threading.Thread(
        target=_exit_without_control, args=(options.control_fd,), name="orphan", daemon=True
    ).start()
    try:
        _serve(options.role, channel, options.directory)
    except KvasirError as error:
        channel.send(fault_of(None, error, "engine_unusable"))
        return error.exit_code
    except ProtocolError as error:
        channel.send(fault_of(None, error, "protocol"))
        return KvasirError.exit_code
    return 0
