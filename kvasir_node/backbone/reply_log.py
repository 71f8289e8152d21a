"""What one connection has answered since its last seal, and the exchanges that are kept for an audit.

The backbone's end of the chain of `kvasir_proto.audit.reply_chain`: digests as they come, nothing computed in
the decode thread. A seal closes a segment, which then belongs to every exchange that was kept of it; whoever
audits checks it, in a thread of its own. Bounded by how often seals are asked for: by count and by time, no
matter what was kept. It refuses to know what is wrong with a row.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvasir_proto.audit.evidence import EXHIBIT_BYTES_MAX, PROGRAMS_TOLD_MAX
from kvasir_proto.audit.reply_chain import (
    FIRST_LINK,
    SEALED_REPLIES,
    Seal,
    claim_in_seal,
    last_link,
    link_said,
    next_program,
    open_seal,
)
from kvasir_proto.capability import CLOCK_SKEW_MAX
from kvasir_proto.dispatch import reply_digest
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId

SEAL_INTERVAL_NS: Final = 1_000_000_000
"""A seal is asked for with the first request after so long, where there is anything to seal."""
KEPT_EXCHANGES_MAX: Final = 64
"""Exchanges that wait for their seal; of more the oldest are evidence of nothing."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Replies between two seals: the number of those before, the link before, their digests, the seal, and
    the wall time when it came.
    """

    n_before: int
    link: bytes
    digests: tuple[bytes, ...]
    seal: bytes
    came_at: int

    def check(self, log: ReplyLog) -> Seal:
        """What the seal says. Raises `RemoteProtocolError` if it is not of this segment and this claim.

        A seal of another time is no evidence, and else nothing: no token hangs on a wall clock; and one of
        other certificates ends the connection, no more. Whose rows are wanted as evidence has to get both
        right all the same.
        """
        seal = open_seal(self.seal, log.model_digest, log.engine_key)
        if seal.n_replies != self.n_before + len(self.digests):
            raise RemoteProtocolError("its seal is of another number of replies", "unaccountable")
        if seal.link != last_link(self.link, self.digests):
            raise RemoteProtocolError("its seal is of other replies than it gave", "unaccountable")
        if seal.programs not in log.told:
            raise RemoteProtocolError("its seal is of programs that it was not told", "unaccountable")
        if log.is_wanted and not self._is_timely(seal):
            raise RemoteProtocolError("its seal is of another time", "unaccountable")
        if seal.claim != claim_in_seal(log.claim):
            code = "unaccountable" if log.is_wanted else "stale_claim"
            raise RemoteProtocolError("it answers as a node with other certificates", code)
        return seal

    def is_evidence(self, log: ReplyLog) -> bool:
        """Whether the seal is one that others take as proof."""
        try:
            return self._is_timely(self.check(log))
        except RemoteProtocolError:
            return False

    def _is_timely(self, seal: Seal) -> bool:
        return abs(seal.at - self.came_at) <= CLOCK_SKEW_MAX


@dataclass(eq=False, slots=True)
class Exchange:
    """A request as it was sent, the rows as they came and their digest: the `number`-th of its connection."""

    log: ReplyLog
    number: int
    request: bytes
    rows: bytes
    digest: bytes
    segment: Segment | None = None

    def check(self) -> None:
        """Raise `RemoteProtocolError` if the worker's digest is of something else than what it sent."""
        if reply_digest(self.request, self.rows) != self.digest:
            raise RemoteProtocolError("the digest of its reply is not of what it sent", "unaccountable")


@dataclass(eq=False, slots=True)
class ReplyLog:
    """One connection's. Used by the thread that reads from it; segments and exchanges by any.

    `claim` is what its node is held to, by digest. `on_sealed` hears of segments, `on_left` that the
    connection is over and something that was kept of it is not sealed. Neither may block.
    """

    node_id: NodeId
    engine_key: bytes
    binding: bytes
    model_digest: bytes
    claim: bytes
    on_sealed: Callable[[ReplyLog, Segment], None] | None = None
    on_left: Callable[[ReplyLog], None] | None = None
    programs: list[tuple[int, bytes]] = field(default_factory=list)
    told: list[bytes] = field(default_factory=lambda: [FIRST_LINK])
    is_wanted: bool = False
    """Whether something is wrong with a row of this connection: its last seal matters."""
    is_left: bool = False
    """Whether the connection is over, and its worker did not stand for what it had answered last."""
    last_segment: Segment | None = None
    _n_sealed: int = 0
    _link: bytes = FIRST_LINK
    _digests: list[bytes] = field(default_factory=list)
    _kept: list[Exchange] = field(default_factory=list)
    _is_asked: bool = False
    _asked_ns: int = 0

    def note_program(self, index: int, program: bytes) -> None:
        """The worker was told this program."""
        self.programs.append((index, program))
        self.told.append(next_program(self.told[-1], index, program))

    def note_reply(self, digest: bytes) -> None:
        """Rows have come, and this digest with them."""
        self._digests.append(digest)

    def keep(self, request: memoryview, rows: memoryview) -> Exchange | None:
        """The exchange that has just been noted, for an audit; None where it is too large for evidence."""
        if len(request) + len(rows) > EXHIBIT_BYTES_MAX or len(self.programs) > PROGRAMS_TOLD_MAX:
            return None
        number = self._n_sealed + len(self._digests) - 1
        kept = Exchange(self, number, bytes(request), bytes(rows), self._digests[-1])
        self._kept.append(kept)
        del self._kept[:-KEPT_EXCHANGES_MAX]
        return kept

    def release(self, exchange: Exchange) -> None:
        """Nothing is wrong with it: it is no evidence of anything."""
        with contextlib.suppress(ValueError):
            self._kept.remove(exchange)

    def waits(self, exchange: Exchange) -> bool:
        """Whether this one is kept, and not sealed."""
        return exchange in self._kept

    @property
    def has_kept(self) -> bool:
        """Whether anything is kept that is not sealed."""
        return bool(self._kept)

    def leave(self) -> None:
        """The connection is over: the worker does not stand for what is kept by now and not sealed."""
        if self._kept:
            self.is_left = True
            if self.on_left is not None:
                self.on_left(self)

    def is_seal_due(self, now_ns: int) -> bool:
        """Whether to ask for a seal behind the next request."""
        if self._is_asked or not self._digests:
            return False
        return len(self._digests) >= SEALED_REPLIES or now_ns - self._asked_ns >= SEAL_INTERVAL_NS

    @property
    def is_seal_under_way(self) -> bool:
        """Whether a seal was asked for that has not come."""
        return self._is_asked

    def note_asked(self, now_ns: int) -> None:
        """A seal was asked for."""
        self._is_asked, self._asked_ns = True, now_ns

    def take_seal(self, data: bytes) -> None:
        """The seal has come: of all replies before it."""
        segment = Segment(self._n_sealed, self._link, tuple(self._digests), data, time.time_ns())
        for each in self._kept:
            each.segment = segment
        self._n_sealed += len(self._digests)
        self._link = link_said(data)
        self._digests, self._kept, self._is_asked = [], [], False
        self.last_segment = segment
        if self.on_sealed is not None:
            self.on_sealed(self, segment)
