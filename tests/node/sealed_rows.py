"""Evidence as a backbone would have it, made by both ends in one process: pure bytes, no connection."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto import dispatch
from kvasir_proto.audit.evidence import Exhibit, RowEvidence, ToldProgram
from kvasir_proto.audit.reply_chain import (
    FIRST_LINK,
    Seal,
    claim_in_seal,
    last_link,
    next_link,
    next_program,
    sign_seal,
)
from kvasir_proto.certificate import bind_engine
from kvasir_proto.dispatch import WireType, reply_digest
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.limits import Role
from kvasir_proto.program import ExpertProgram
from tests.node.tls_ends import EngineEnd, make_engine_end


@dataclass
class SealingWorker:
    """A worker's end, and what its backbone keeps of it."""

    node_key: Ed25519PrivateKey
    swarm: SwarmDigest
    program: ExpertProgram
    model_digest: bytes = bytes(32)
    claim_digest: bytes = b""
    at: int = 1 << 60
    role: Role = "worker"
    exchanges: list[tuple[bytes, bytes]] = field(default_factory=list)
    links: list[bytes] = field(default_factory=lambda: [FIRST_LINK])

    def __post_init__(self) -> None:
        self.end: EngineEnd = make_engine_end(self._bind)

    def _bind(self, key: bytes) -> bytes:
        self.binding = bind_engine(self.node_key, self.swarm, key, self.role, 1)
        return self.binding

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.node_key.public_key().public_bytes_raw())

    def answer(
        self,
        layer: int,
        experts: Sequence[int],
        rows: Sequence[Sequence[float]],
        answers: Sequence[Sequence[float]],
        *,
        program: int = 0,
    ) -> int:
        """One reply: a row and an answer for each expert. Its number."""
        width = len(rows[0])
        frame = bytearray(dispatch.HEADER_BYTES)
        dispatch.pack_dispatch_into(
            frame,
            request_id=len(self.exchanges),
            epoch=0,
            term=1,
            layer=layer,
            program=program,
            n_rows=len(rows),
            n_pairs=len(experts),
            n_embd_in=width,
            wire_type=WireType.F32,
        )
        frame += struct.pack(f"<{len(experts)}i", *range(len(experts)))
        frame += struct.pack(f"<{len(experts)}i", *experts)
        frame += b"".join(struct.pack(f"<{width}f", *row) for row in rows)
        given = b"".join(struct.pack(f"<{len(each)}f", *each) for each in answers)
        self.exchanges.append((bytes(frame), given))
        self.links.append(next_link(self.links[-1], reply_digest(bytes(frame), given)))
        return len(self.exchanges) - 1

    def seal(self) -> bytes:
        """Of all replies so far."""
        told = next_program(FIRST_LINK, 0, self.program.encode())
        claim = claim_in_seal(self.claim_digest)
        seal = Seal(len(self.exchanges), self.links[-1], told, claim, self.at)
        return sign_seal(seal, self.model_digest, self.end.credentials.sign)

    def exhibit(self, number: int, pairs: Sequence[int]) -> Exhibit:
        """One reply, sealed by a seal of all."""
        request, rows = self.exchanges[number]
        later = tuple(reply_digest(*each) for each in self.exchanges[number + 1 :])
        assert last_link(self.links[number], (reply_digest(request, rows), *later)) == self.links[-1]
        return Exhibit(request, rows, tuple(pairs), self.links[number], number, later, self.seal())

    def evidence(self, shown: dict[int, Sequence[int]]) -> RowEvidence:
        """Replies by number, and which of their pairs are held against the node."""
        return RowEvidence(
            self.node_id,
            self.binding,
            self.end.key,
            (ToldProgram(0, self.program.encode()),),
            tuple(self.exhibit(number, pairs) for number, pairs in shown.items()),
        )
