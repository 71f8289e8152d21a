"""`python -m tests.reply_cost`: what standing for its answers costs a worker and its backbone.

Both ends of one connection in one process: a token through four experts of the demo model's shape, again and
again, with the backbone's log and its seals and without, in turn. Processor time of both ends, which other
work on the machine disturbs less than the clock; the trunk, which takes most of a token, is not there.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import threading
import time
from typing import Final

import numpy as np

from kvasir_node.backbone.holder import IndexBuffer, RemoteHolder, Request, open_remote_holder
from kvasir_node.backbone.reply_log import ReplyLog
from kvasir_node.certification.certify import expert_program
from kvasir_node.certification.crafted_weights import random_rows
from kvasir_node.certification.synthetic_model import ExpertShape, SyntheticExperts
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.worker.connection import BackboneConnection, ServingCounters
from kvasir_proto import dispatch
from kvasir_proto.dispatch import FrameKind, Opening
from kvasir_proto.ids import node_id_of
from tests.node.tls_ends import seals_of, tls_pair, worker_end

SHAPE: Final = ExpertShape(256, 128)
N_EXPERT: Final = 4
REPLIES: Final = 2000
RUNS: Final = 7
_PATIENCE_NS: Final = 10_000_000_000


def made_experts() -> SyntheticExperts:
    """Noise in Q8_0."""
    draws = np.random.default_rng(1)
    parts = {
        part: np.stack([random_rows("q8_0", *SHAPE.shape_of(part)[::-1], draws) for _ in range(N_EXPERT)])
        for part in ("gate", "up", "down")
    }
    return SyntheticExperts(SHAPE, "q8_0", parts)


class Asking:
    """Requests on one connection, one after the other."""

    def __init__(self, holder: RemoteHolder) -> None:
        self._holder = holder
        self._ids = itertools.count(1)
        self._pairs = IndexBuffer(np.arange(N_EXPERT, dtype=np.int32))
        self._x = np.random.default_rng(2).standard_normal((1, SHAPE.n_embd)).astype(np.float32)
        program = expert_program().encode()
        if holder.log is not None:
            holder.log.note_program(0, program)
        self._exchange(dispatch.pack_plain(FrameKind.PROGRAM, next(self._ids), program), 0)

    def ask(self) -> None:
        """A token through all experts, and a seal where one is due, as a dispatcher does."""
        frame = bytearray(dispatch.HEADER_BYTES)
        request_id = next(self._ids)
        dispatch.pack_dispatch_into(
            frame,
            request_id=request_id,
            epoch=0,
            term=1,
            layer=0,
            program=0,
            n_rows=1,
            n_pairs=N_EXPERT,
            n_embd_in=SHAPE.n_embd,
        )
        frame += np.zeros(N_EXPERT, np.int32).tobytes() + self._pairs.values.tobytes() + self._x.tobytes()
        self._exchange(bytes(frame), N_EXPERT, request_id)

    def _exchange(self, frame: bytes, n_pairs: int, request_id: int = 1) -> None:
        holder, now_ns = self._holder, time.monotonic_ns()
        width = SHAPE.n_embd if n_pairs else 0
        holder.submit(
            Request(
                *(request_id, memoryview(frame), self._pairs, 0, n_pairs, n_pairs, width),
                *(now_ns, now_ns + _PATIENCE_NS),
            )
        )
        if holder.log is not None and holder.log.is_seal_due(now_ns):
            holder.ask_for_seal(next(self._ids), holder.log, now_ns)
        while holder.outstanding:
            holder.send_pending()
            holder.receive_reply()


def time_a_reply_us(experts: SyntheticExperts, *, is_sealed: bool) -> float:
    """Processor time of both ends, in microseconds a reply."""
    kernel, (client, server) = experts.load(GgmlCpuKernel), tls_pair()
    seal = seals_of(worker_end())
    connection = BackboneConnection(
        server, kernel, threading.Lock(), lambda opening: None, lambda: (0, 1), ServingCounters(), seal
    )
    thread = threading.Thread(target=connection.serve, args=(threading.Event(),))
    thread.start()
    node_id = node_id_of(bytes(32))
    holder = open_remote_holder(node_id, client, Opening(0, 1, b"proof", bytes(32)).encode())
    if is_sealed:
        holder.log = ReplyLog(node_id, worker_end().key, b"", bytes(32), bytes(32))
    asking = Asking(holder)
    for _ in range(REPLIES // 10):
        asking.ask()
    began = time.process_time()
    for _ in range(REPLIES):
        asking.ask()
    used = time.process_time() - began
    client.close()
    thread.join()
    server.close()
    kernel.close()
    return used / REPLIES * 1e6


def main() -> None:
    """Print the medians and the least of both."""
    experts = made_experts()
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(RUNS):
        for is_sealed, times in found.items():
            times.append(time_a_reply_us(experts, is_sealed=is_sealed))
    for is_sealed, times in found.items():
        name = "with log and seals" if is_sealed else "without"
        median = statistics.median(times)
        sys.stdout.write(f"{name}: median {median:.1f} us a reply, least {min(times):.1f}\n")


if __name__ == "__main__":
    main()
