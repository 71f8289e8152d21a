"""A small core that does everything a core can do, rightly: what the simulator's machinery is tested on.

The founder is the backbone of (0, 1) for ever and says so, with the proof, to everybody who ever spoke to it.
Whoever hears it follows the term and answers. Broken variants of it are in the checkers' tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Final

from kvasir_node.sim.swarm import Core, NodeIdentity, SimNode, Swarm
from kvasir_proto.effects import FetchRecord, Notice, Now, Persist, Publish, Send, Slot
from kvasir_proto.election.requests import LeaseHeld, TermFollowed
from kvasir_proto.ids import NodeId, SwarmDigest
from kvasir_proto.instants import Instant, milliseconds
from kvasir_proto.limits import Digest, ProofBytes, Sequence63
from kvasir_proto.membership.events import MemberChanged
from kvasir_proto.messages import Family
from kvasir_proto.term_proof import (
    ProvenTerm,
    cast_vote,
    founding_electorate,
    make_term_proof,
    verify_term_proof,
)

SWARM: Final = SwarmDigest(bytes(32))
BEAT: Final = milliseconds(500)


@dataclass(frozen=True, slots=True)
class Here:
    kind: ClassVar[str] = "here"
    starts: Sequence63


@dataclass(frozen=True, slots=True)
class Beat:
    kind: ClassVar[str] = "beat"
    proof: ProofBytes
    record_digest: Digest


TOY: Final[Family[Any]] = Family("toy", (Here, Beat), 16 << 10)


@dataclass(frozen=True, slots=True)
class Seed:
    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Say:
    """Ask a core for these effects."""

    effects: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class ToyView:
    fence: ProvenTerm | None
    known: tuple[NodeId, ...]


class ToyCore:
    def __init__(self, kit: ToyKit, identity: NodeIdentity, stored: Mapping[Slot, bytes], now: Now) -> None:
        self.kit = kit
        self.identity = identity
        self.starts = int(stored.get("incarnation", b"0")) + 1
        self.backbone: NodeId | None = None
        self.known: set[NodeId] = set()
        self.records: dict[NodeId, bytes] = {}
        self.lost: list[NodeId] = []
        self.received: list[tuple[NodeId, Any]] = []
        self._beat_at = now.instant
        self._effects: list[Any] = [Persist("incarnation", str(self.starts).encode())]
        if "fence" in stored:
            self.backbone = NodeId(stored["fence"].decode())
        if identity.index == 0:
            self._follow(kit.term, kit.proof)

    def receive(self, message: Any, sender: NodeId, now: Now) -> None:
        self.received.append((sender, message))
        if sender not in self.known:
            self.known.add(sender)
            self._effects.append(MemberChanged(sender, "alive", "well", "it spoke", None))
        if isinstance(message, Beat):
            term = verify_term_proof(message.proof, SWARM, self.kit.electorate)
            if self.backbone is None:
                self._follow(term, message.proof)
            if hashlib.sha256(self.records.get(sender, b"")).digest() != message.record_digest:
                self._effects.append(FetchRecord(sender, message.record_digest, sender))

    def receive_published(self, topic: Any, data: bytes, forwarder: NodeId, now: Now) -> None:
        self.records[NodeId(data.decode().split()[0])] = data

    def receive_record(self, data: bytes, now: Now) -> None:
        self.receive_published("records", data, self.identity.node_id, now)

    def command(self, request: Any, now: Now) -> None:
        if isinstance(request, Seed):
            self.known.update(request.node_ids)
        elif isinstance(request, Say):
            self._effects.extend(request.effects)
        else:
            self.lost.append(request)

    def tick(self, now: Now) -> None:
        self._beat_at = Instant(now.instant + BEAT)
        if self.identity.index == 0:
            self._effects.append(LeaseHeld(0, 1, Instant(now.instant + 2 * BEAT)))
            digest = hashlib.sha256(self.record()).digest()
            beat = Beat(self.kit.proof, digest)
            self._effects.extend(Send(each, beat) for each in sorted(self.known))
        else:
            self._effects.extend(Send(each, Here(self.starts)) for each in sorted(self.known))

    def next_deadline(self) -> Instant | None:
        return self._beat_at

    def drain(self) -> Sequence[Any]:
        effects, self._effects = self._effects, []
        return effects

    def view(self) -> ToyView:
        fence = None if self.backbone is None else ProvenTerm(0, 1, self.backbone)
        return ToyView(fence, tuple(sorted(self.known)))

    def record(self) -> bytes:
        return f"{self.identity.node_id} {self.starts}".encode()

    def announce(self) -> Publish:
        return Publish("records", self.record())

    def _follow(self, term: ProvenTerm, proof: bytes) -> None:
        self.backbone = term.backbone
        self._effects.append(Persist("fence", term.backbone.encode()))
        self._effects.append(TermFollowed(term, proof))
        self._effects.append(Notice("term_followed", (("term", term.term),)))


class ToyKit:
    family = TOY

    def __init__(self, core: type[ToyCore] = ToyCore) -> None:
        self.core = core
        self.entropy: list[Random] = []

    def start(self, identity: NodeIdentity, stored: Mapping[Slot, bytes], entropy: Random, now: Now) -> Core:
        if identity.index == 0:
            public_key = identity.private_key.public_key().public_bytes_raw()
            self.electorate = founding_electorate(public_key)
            self.term = ProvenTerm(0, 1, identity.node_id)
            vote = cast_vote(identity.private_key, SWARM, self.electorate, self.term)
            self.proof = make_term_proof(self.electorate, self.term, [vote])
        self.entropy.append(entropy)
        return self.core(self, identity, stored, now)

    def seed(self, node_ids: tuple[NodeId, ...]) -> object:
        return Seed(node_ids)

    def leave(self, reason: str) -> object:
        return Say((Notice("left", (("reason", reason),)),))

    def connection_lost(self, node_id: NodeId) -> object:
        return node_id

    def react(self, swarm: Swarm, node: SimNode, event: object) -> None:
        pass
