"""Whom a node that needs experts asks for which, and whom it passes over for how long.

`ExpertSources` is one fetch: what is still wanted, who is busy with what, and what somebody said it has not.
Members that say they hold an expert are asked before all others; the others, one of which may have the whole
model, are asked for what nobody of those gives. `PassedOver` outlives a fetch: who was wrong, slow or silent
is left alone for a while, longer each time. It knows no streams and no digests: whether bytes were right it
is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, seconds
from kvasir_proto.manifest import ShardSet

RUN_SIZE_BYTES_MAX: Final = 4 << 20
"""Bytes of the experts that one member is asked for at a time; one expert may have more."""
ASKED_AT_ONCE_MAX: Final = 4
"""Members that are asked at the same time."""
OTHERS_MAX: Final = 16
"""Members that do not say they hold what is wanted and are asked all the same, in one fetch."""
NOT_HELD_MAX: Final = 8
"""Times that one member may say it has not what it was asked for; then nothing more is asked of it."""
PASSED_OVER_MAX: Final = 1024
"""Members that are remembered; whoever is to be asked again soonest is forgotten first."""
PATIENCE_MAX: Final[Duration] = seconds(1800)

Fault: TypeAlias = Literal["busy", "failed", "damaged"]
"""It has no time, it was silent, slow, refused or broke off, or what it gave was not what it should be."""
_PATIENCE: Final[Mapping[Fault, Duration]] = {
    "busy": seconds(3),
    "failed": seconds(15),
    "damaged": seconds(600),
}
"""How long a member is passed over after its first fault; twice as long after each further one."""


class PassedOver:
    """Who is not asked for the time being."""

    def __init__(self) -> None:
        self._until: dict[NodeId, Instant] = {}
        self._n_faults: dict[NodeId, int] = {}

    def note_fault(self, node_id: NodeId, fault: Fault, now: Instant) -> None:
        """Pass it over from now on."""
        doublings = min(self._n_faults.get(node_id, 0), 16)
        patience = min(PATIENCE_MAX, _PATIENCE[fault] << doublings)
        until = after(now, Duration(patience))
        self._until[node_id] = max(until, self._until.get(node_id, until))
        self._n_faults[node_id] = doublings + (fault != "busy")
        if len(self._until) > PASSED_OVER_MAX:
            self._forget(min(self._until, key=lambda each: (self._until[each], each)))

    def note_given(self, node_id: NodeId) -> None:
        """It gave what was asked for, and that was right."""
        self._forget(node_id)

    def is_passed_over(self, node_id: NodeId, now: Instant) -> bool:
        """Whether it is not to be asked at this moment."""
        return now < self._until.get(node_id, now)

    def _forget(self, node_id: NodeId) -> None:
        self._until.pop(node_id, None)
        self._n_faults.pop(node_id, None)


@dataclass(frozen=True, slots=True)
class WantedExpert:
    """One expert's part of one tensor, of which the first `begun_bytes` are here."""

    tensor: str
    layer: int
    expert: int
    size_bytes: int
    begun_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ExpertRun:
    """Neighbouring experts of one tensor; of the first one some bytes may be here."""

    experts: tuple[WantedExpert, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(each.size_bytes for each in self.experts)


class ExpertSources:
    """One fetch of ``wanted``, by the node ``own``, whose id spreads who is asked first."""

    def __init__(self, wanted: Iterable[WantedExpert], own: NodeId, passed_over: PassedOver) -> None:
        self._own = own
        self._passed_over = passed_over
        self._left: dict[str, dict[int, WantedExpert]] = {}
        for each in sorted(wanted, key=lambda one: (one.layer, one.tensor, one.expert)):
            self._left.setdefault(each.tensor, {})[each.expert] = each
        self._busy: set[NodeId] = set()
        self._not_held: dict[NodeId, set[tuple[str, int]]] = {}
        self._others_asked: set[NodeId] = set()

    @property
    def n_left(self) -> int:
        """Experts' parts that nobody has been asked for, or did not give."""
        return sum(map(len, self._left.values()))

    def next_run(
        self, holders: Mapping[NodeId, ShardSet], others: Sequence[NodeId], now: Instant
    ) -> tuple[NodeId, ExpertRun] | None:
        """Whom to ask now for what; it is busy until `take_back`. None where nobody is to be asked.

        ``holders`` say what they hold. ``others`` do not, and are asked, in this order, only for what no
        holder can be asked for and while none is busy.
        """
        if len(self._busy) >= ASKED_AT_ONCE_MAX:
            return None
        free = [each for each in holders if self._may_ask(each, now)]
        for node_id in sorted(free, key=self._turn):
            if (run := self._run_of(node_id, holders[node_id])) is not None:
                return self._begin(node_id, run)
        if self._busy - self._others_asked:
            return None
        for node_id in others:
            if not self._may_ask(node_id, now) or node_id == self._own:
                continue
            if node_id not in self._others_asked and len(self._others_asked) >= OTHERS_MAX:
                continue
            if (run := self._run_of(node_id, None)) is not None:
                self._others_asked.add(node_id)
                return self._begin(node_id, run)
        return None

    def take_back(self, node_id: NodeId, left: Iterable[WantedExpert], *, not_held: bool = False) -> None:
        """It is done with its run, but for these, of which the first it has ``not_held`` by its own word."""
        self._busy.discard(node_id)
        left = tuple(left)
        for each in left:
            self._left.setdefault(each.tensor, {})[each.expert] = each
        if not_held and left:
            self._not_held.setdefault(node_id, set()).add((left[0].tensor, left[0].expert))

    def _may_ask(self, node_id: NodeId, now: Instant) -> bool:
        return (
            node_id not in self._busy
            and node_id != self._own
            and len(self._not_held.get(node_id, ())) < NOT_HELD_MAX
            and not self._passed_over.is_passed_over(node_id, now)
        )

    def _turn(self, node_id: NodeId) -> bytes:
        """Nodes that begin at the same moment do not all ask the same one first."""
        return hashlib.sha256(f"{self._own} {node_id}".encode()).digest()

    def _begin(self, node_id: NodeId, run: ExpertRun) -> tuple[NodeId, ExpertRun]:
        self._busy.add(node_id)
        for each in run.experts:
            del self._left[each.tensor][each.expert]
        return node_id, run

    def _run_of(self, node_id: NodeId, held: ShardSet | None) -> ExpertRun | None:
        """The first neighbouring experts that are left and that it may have."""
        lacking = self._not_held.get(node_id, set())
        layers = None if held is None else set(held.layers)
        for tensor, experts in self._left.items():
            run: list[WantedExpert] = []
            size_bytes = 0
            for expert in sorted(experts):
                each = experts[expert]
                if layers is not None and each.layer not in layers:
                    break
                is_there = (held is None or (each.layer, expert) in held) and (tensor, expert) not in lacking
                if run and (
                    not is_there
                    or expert != run[-1].expert + 1
                    or each.begun_bytes
                    or size_bytes + each.size_bytes > RUN_SIZE_BYTES_MAX
                ):
                    break
                if is_there:
                    run.append(each)
                    size_bytes += each.size_bytes
            if run:
                return ExpertRun(tuple(run))
        return None


def rest_of(run: ExpertRun, came_bytes: int) -> tuple[WantedExpert, ...]:
    """What of a run is still wanted when ``came_bytes`` more of it are here than when it was asked for."""
    come = run.experts[0].begun_bytes + came_bytes
    left = []
    for each in run.experts:
        here = min(come, each.size_bytes)
        come -= here
        if here < each.size_bytes:
            left.append(replace(each, begun_bytes=here))
    return tuple(left)
