"""Exchanges in which a row was wrong, by node, and the evidence that is made of them.

What the audit finds is its own opinion; what it can show to others is here. A node that was found out is
accused once enough of its rows are sealed, which may be a second after the verdict. Seals are checked as they
come: a worker that does not stand for what it answered is given up like one that answers wrongly, and so is
one that ends its connection, refuses or is silent where some of that is wrong. It judges no rows and tells
nobody but its engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvasir_node.backbone.reply_log import Exchange, ReplyLog, Segment
from kvasir_proto.audit.evidence import (
    EXHIBITS_MAX,
    ROWS_NEEDED,
    ROWS_OF_AN_EXHIBIT_MAX,
    Exhibit,
    RowEvidence,
    ToldProgram,
)
from kvasir_proto.audit.reply_chain import SEALED_REPLIES_MAX, last_link
from kvasir_proto.codec import encode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import NodeId

ROWS_SHOWN: Final = 2 * ROWS_NEEDED
"""Rows after which no other exchange is added: some may be such that an elector cannot judge them."""
NODES_MAX: Final = 16
"""Nodes of which exchanges are kept, those that were found out last: 1 MiB each at most."""


class Wrong(NamedTuple):
    """A pair of an exchange whose row nothing explains, and what tells that row from others."""

    exchange: Exchange
    pair: int
    row: bytes


class Exhibits:
    """See the module. Any thread may call; `on_evidence` is called from there and must not block."""

    def __init__(self, on_evidence: Callable[[NodeId, bytes, bytes], None]) -> None:
        """`on_evidence` gets a node, the digest of its claim that its rows were given under, and evidence."""
        self._on_evidence = on_evidence
        self._lock = threading.Lock()
        self._wrong: dict[NodeId, deque[Wrong]] = {}
        self._accused: dict[NodeId, None] = {}

    def note(self, wrong: Wrong) -> None:
        """Nothing explains this row. Raises `RemoteProtocolError`, `unaccountable`, if its node has not stood
        for it where it could.
        """
        log = wrong.exchange.log
        log.is_wanted = True
        if not log.waits(wrong.exchange) and wrong.exchange.segment is None:
            return  # it was let go, and would take the place of one that can be shown
        with self._lock:
            of_node = self._wrong.pop(log.node_id, None)
            if of_node is None or of_node[0].exchange.log is not log:
                of_node = deque(maxlen=2 * EXHIBITS_MAX)  # evidence is of one connection
            of_node.append(wrong)
            self._wrong[log.node_id] = of_node
            while len(self._wrong) > NODES_MAX:
                gone = next(iter(self._wrong))
                del self._wrong[gone]
                self._accused.pop(gone, None)
        if wrong.exchange.segment is not None:
            wrong.exchange.segment.check(log)  # it counts for more than when it came
        self._require_sealed(log)

    def take_end(self, log: ReplyLog) -> None:
        """A connection is over. Raises `RemoteProtocolError` as `note` does."""
        self._require_sealed(log)

    def _require_sealed(self, log: ReplyLog) -> None:
        with self._lock:
            wrong = tuple(self._wrong.get(log.node_id, ()))
        if log.is_left and any(log.waits(each.exchange) for each in wrong):
            raise RemoteProtocolError(
                "it has not stood for what it answered last, of which some is wrong", "unaccountable"
            )

    def take_segment(self, log: ReplyLog, segment: Segment) -> None:
        """A connection was sealed: show what waited for that. Raises `RemoteProtocolError` as its check."""
        segment.check(log)
        self._show(log.node_id)

    def accuse(self, node_id: NodeId) -> None:
        """This node was found out: show why as soon as that can be shown."""
        with self._lock:
            self._accused[node_id] = None
            while len(self._accused) > NODES_MAX:
                del self._accused[next(iter(self._accused))]
        self._show(node_id)

    def _show(self, node_id: NodeId) -> None:
        with self._lock:
            if node_id not in self._accused:
                return
            wrong = tuple(self._wrong.get(node_id, ()))
            evidence = _evidence_of(wrong)
            if evidence is None:
                return
            del self._accused[node_id]
        try:
            data = encode(evidence)
        except LocalProtocolError:
            return  # more than evidence may be: this stays an opinion
        self._on_evidence(node_id, wrong[0].exchange.log.claim, data)  # all are of one connection


def _evidence_of(wrong: tuple[Wrong, ...]) -> RowEvidence | None:
    """What these rows are evidence of, if they are enough; those that are not sealed yet are none."""
    found: dict[Exchange, dict[bytes, int]] = {}
    for each in wrong:
        if each.exchange.segment is not None:
            found.setdefault(each.exchange, {}).setdefault(each.row, each.pair)
    by_exchange: dict[Exchange, list[int]] = {}
    seen: set[bytes] = set()
    # Those that show most first: everybody who votes is to fetch it.
    for exchange in sorted(found, key=lambda each: -len(found[each])):
        rows = [row for row in found[exchange] if row not in seen][:ROWS_OF_AN_EXHIBIT_MAX]
        if len(seen) >= ROWS_SHOWN or len(by_exchange) == EXHIBITS_MAX:
            break
        if rows and _is_sealed_well(exchange):
            by_exchange[exchange] = [found[exchange][row] for row in rows]
            seen.update(rows)
    if len(seen) < ROWS_NEEDED:
        return None
    log = next(iter(by_exchange)).log
    return RowEvidence(
        log.node_id,
        log.binding,
        log.engine_key,
        tuple(ToldProgram(index, program) for index, program in log.programs),
        tuple(_exhibit(exchange, pairs) for exchange, pairs in by_exchange.items()),
    )


def _is_sealed_well(exchange: Exchange) -> bool:
    segment = exchange.segment
    assert segment is not None
    return len(segment.digests) <= SEALED_REPLIES_MAX and segment.is_evidence(exchange.log)


def _exhibit(exchange: Exchange, pairs: list[int]) -> Exhibit:
    segment = exchange.segment
    assert segment is not None
    place = exchange.number - segment.n_before
    return Exhibit(
        request=exchange.request,
        rows=exchange.rows,
        pairs=tuple(sorted(pairs)),
        link=last_link(segment.link, segment.digests[:place]),
        n_before=exchange.number,
        later=segment.digests[place + 1 :],
        seal=segment.seal,
    )
