"""Anything at all that members may say, in any order: a core goes on, within its bounds."""

from __future__ import annotations

import random

import pytest

from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Now, Persist, Send
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.membership.core import MembershipCore
from kvasir_proto.membership.events import AnnounceRecord, ConnectionLost, Seed
from kvasir_proto.membership.options import LAN, PROBES_MAX, RELAYS_MAX
from kvasir_proto.messages.membership import (
    BUCKET_DIGEST_SIZE,
    BUCKETS,
    MEMBERSHIP,
    RESERVED_INCARNATIONS,
    STATES,
    Ack,
    Departure,
    Gossip,
    MembershipMessage,
    MemberUpdate,
    Ping,
    PingRequest,
    ProbeResult,
    ViewPart,
    ViewRequest,
    pack_update,
)
from tests.proto.membership.simulation import EPOCH_WALL, MILLISECOND, NODE_IDS, SECOND

NAMES = NODE_IDS[:12]
INSTANCES = (b"run one ", b"run two ")


def _updates(draw: random.Random, core: MembershipCore) -> bytes:
    return b"".join(
        pack_update(
            MemberUpdate(
                draw.choice(NAMES),
                draw.choice(STATES),
                draw.choice((1, 2, 3, core.incarnation, core.incarnation + 1, 2**48 - 1)),
                draw.choice(INSTANCES),
                draw.randbytes(4),
                draw.choice((0, 1, 2, 2**63 - 1)),
                draw.choice((bytes(32), b"d" * 32)),
            )
        )
        for _ in range(draw.randrange(5))
    )


def _message(draw: random.Random, core: MembershipCore, sequences: list[int]) -> MembershipMessage:
    run = (draw.choice((0, 1, 2, core.incarnation, 2**48 - 1)), draw.choice(INSTANCES))
    sequence = draw.choice([*sequences[-20:], 0, 2**63 - 1])
    updates = _updates(draw, core)
    target = draw.choice(NAMES)
    size = BUCKETS * BUCKET_DIGEST_SIZE
    return draw.choice(
        (
            Ping(sequence, *run, updates),
            Ack(sequence, draw.choice((0, EPOCH_WALL, 2**63 - 1)), *run, updates),
            PingRequest(sequence, target, *run, updates),
            ProbeResult(sequence, target, draw.random() < 0.5, *run, updates),
            Gossip(*run, updates),
            ViewRequest(draw.choice((bytes(size), core.table_digest(), draw.randbytes(size))), *run),
            ViewPart(
                draw.randrange(BUCKETS),
                draw.randbytes(8),
                draw.random() < 0.5,
                draw.random() < 0.5,
                draw.random() < 0.5,
                draw.randrange(BUCKETS + 1),
                *run,
                updates,
            ),
            Departure("why", *run, updates),
        )
    )


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_said_the_core_goes_on_within_its_bounds(seed: int) -> None:
    draw = random.Random(seed)
    instant = 0

    def now() -> Now:
        return Now(Instant(instant), WallTime(EPOCH_WALL + instant))

    core = MembershipCore(node_id=NAMES[0], options=LAN, stored=None, entropy=random.Random(seed), now=now())
    sequences: list[int] = []
    reserved = incarnation = 0
    for step in range(2000):
        instant += draw.choice(
            (0, MILLISECOND, 50 * MILLISECOND, SECOND, 61 * SECOND if step % 97 == 0 else 0)
        )
        choice = draw.random()
        if choice < 0.6:
            core.receive(_message(draw, core, sequences), draw.choice(NAMES), now())
        elif choice < 0.9:
            deadline = core.next_deadline()
            assert deadline is not None
            instant = max(instant, deadline) if draw.random() < 0.8 else instant
            core.tick(now())
            after = core.next_deadline()
            assert after is not None
            assert after > instant, "a tick that leaves something due would spin"
        elif choice < 0.97:
            core.command(ConnectionLost(draw.choice(NAMES)), now())
        else:
            core.command(draw.choice((Seed(tuple(NAMES)), AnnounceRecord(step, bytes(32)))), now())
        effects = core.drain()
        for effect in effects:
            if isinstance(effect, Persist):
                reserved = decode(effect.data, RESERVED_INCARNATIONS).first_free
            elif isinstance(effect, Send):
                assert effect.to != NAMES[0]
                data = encode(effect.message)
                assert decode(data, MEMBERSHIP) == effect.message
                assert not isinstance(effect.message, ViewRequest) or len(data) < 1000
                sequences.append(getattr(effect.message, "sequence", 0))
        assert sum(isinstance(effect, Send) for effect in effects) <= 64
        assert incarnation <= core.incarnation < reserved, "incarnations never fall, and are reserved first"
        incarnation = core.incarnation
        assert len(core._probes) <= PROBES_MAX
        assert len(core._relays) <= RELAYS_MAX
        assert len(core._timers) <= 2000
        assert core.live_count == 1 + sum(each.state in ("alive", "suspect") for each in core.members())
        assert set(core.view()) <= {each.node_id for each in core.members()}
