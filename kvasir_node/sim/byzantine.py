"""Nodes that lie: a real core whose words are changed, repeated and contradicted on their way out.

A liar keeps its core, so it takes part and is believed to be one of many. Beside what the core says it says
again what it said before, changes any field of a message to what it likes, and signs with its own key
whatever it can sign: votes for terms nobody asked for, records that claim too much, two of everything.
Twins are two honest cores under one key, each with half of the swarm (Bano et al., "Twins: BFT systems made
robust"): an elector's equivocation in its purest form, and also what a copied home does. Nobody can sign
for another, and no liar tries to break a signature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from kvasir_node.sim.swarm import SimNode, Swarm
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import ProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, is_node_id
from kvasir_proto.messages import Family, Message
from kvasir_proto.signing import SIGNED, sign, verify

MEMORY_MAX: Final = 128
"""Messages and blobs that a liar remembers, to say them again."""

SPARED: Final = frozenset({"stands_for_elector"})
"""Fields that no liar changes: the run alone gives liars votes, and keeps within what is tolerated."""


class Twin:
    """Says exactly what its core says; the lie is that there are two of it."""

    def outgoing(self, swarm: Swarm, node: SimNode, to: NodeId, message: Message) -> None:
        """Send it."""
        swarm.send(node, to, message)

    def publishes(self, swarm: Swarm, node: SimNode, topic: str, data: bytes) -> None:
        """Publish it."""
        swarm.publish(node, topic, data)


class Liar:
    """Says what its core says, mostly, and then more.

    `families` are the kinds of payload that a signature may cover, so that a liar can sign other ones.
    """

    def __init__(
        self, swarm_digest: SwarmDigest, families: Mapping[str, Family[Any]], randomness: Random
    ) -> None:
        self.counts: dict[str, int] = {}
        self._swarm_digest = swarm_digest
        self._families = families
        self._random = randomness
        self._said: list[bytes] = []
        self._blobs: list[bytes] = []
        self._published: list[tuple[str, bytes]] = []

    def outgoing(self, swarm: Swarm, node: SimNode, to: NodeId, message: Message) -> None:
        """Send the message, or a changed one, or both; and now and then an old one to somebody."""
        draw = self._random.random()
        if draw < 0.7:
            swarm.send(node, to, message)
        self._remember(self._said, encode(message))
        if draw > 0.5:
            changed = self._changed(node, message, swarm)
            if changed is not None:
                self._count("forged")
                swarm.send_bytes(node, to, changed)
        if draw > 0.9 and self._said:
            self._count("replayed")
            someone = self._random.choice(swarm.nodes).node_id
            swarm.send_bytes(node, someone, self._random.choice(self._said))

    def publishes(self, swarm: Swarm, node: SimNode, topic: str, data: bytes) -> None:
        """Publish it, and another one in its place, and an old one again."""
        swarm.publish(node, topic, data)
        if self._published and self._random.random() < 0.5:
            self._count("republished")
            swarm.publish(node, *self._random.choice(self._published))
        self._published.append((topic, data))
        del self._published[:-MEMORY_MAX]
        other = self._signed_anew(node, data, swarm)
        if other is not None:
            self._count("equivocated")
            swarm.publish(node, topic, other)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _remember(self, memory: list[bytes], data: bytes) -> None:
        if len(memory) < MEMORY_MAX:
            memory.append(data)
        else:
            memory[self._random.randrange(MEMORY_MAX)] = data

    # --- changing what is said ------------------------------------------------------------------------------

    def _changed(self, node: SimNode, message: Message, swarm: Swarm) -> bytes | None:
        """The message with one field changed; None if it can no longer be said then."""
        fields = [
            each
            for each in dataclasses.fields(message)  # type: ignore[arg-type]  # every message is a dataclass
            if each.name not in SPARED
        ]
        if not fields:
            return None
        field = self._random.choice(fields)
        value = self._another(node, getattr(message, field.name), swarm)
        try:
            return encode(dataclasses.replace(message, **{field.name: value}))  # type: ignore[type-var]
        except ProtocolError:
            return None

    def _another(self, node: SimNode, value: Any, swarm: Swarm) -> Any:
        choose = self._random.choice
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return choose((0, value + 1, max(0, value - 1), value + 1000, 2 * value, (1 << 31) - 1))
        if isinstance(value, bytes):
            return self._other_bytes(node, value, swarm)
        if isinstance(value, str):
            return choose(swarm.nodes).node_id if is_node_id(value) else choose(("F32", "alive", "", value))
        if isinstance(value, tuple) and value:
            return choose(
                (value[:-1], (*value, value[0]), (self._another(node, value[0], swarm), *value[1:]))
            )
        return value

    def _other_bytes(self, node: SimNode, value: bytes, swarm: Swarm) -> bytes:
        """Other bytes: signed anew, heard or said before, or with one bit changed."""
        self._remember(self._blobs, value)
        if self._random.random() < 0.6:
            anew = self._signed_anew(node, value, swarm)
            if anew is not None:
                return anew
        if self._random.random() < 0.5:
            return self._random.choice(self._blobs)
        changed = bytearray(value)
        if changed:
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _signed_anew(self, node: SimNode, data: bytes, swarm: Swarm) -> bytes | None:
        """What these signed bytes say, changed and signed by this node; None if they are not signed bytes."""
        try:
            signed = decode(data, SIGNED)
            family = self._families.get(signed.payload_kind)
            if family is None:
                return None
            inner = decode(verify(signed, signed.payload_kind, self._swarm_digest), family)
            payload = self._changed(node, inner, swarm)
            if payload is None:
                return None
            return encode(sign(node.identity.private_key, signed.payload_kind, self._swarm_digest, payload))
        except ProtocolError:
            return None
