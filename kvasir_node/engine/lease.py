"""The lease as an engine sees it: an absolute end on a clock that counts suspend.

Control says until when this backbone may decode and emit; the engine looks at its own clock before each
decode and before each emitted token, so that a control process that is stopped cannot keep it alive
(invariant 6). The module knows nothing of how a lease is won.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

from kvasir_proto.errors import EngineFailed


class LeaseExpired(EngineFailed):
    """The right to decode and emit under a term has run out."""


PATIENCE_S: Final = 5.0
"""How long a check waits for control to renew a lease that has run out."""


@dataclass(frozen=True, slots=True)
class _Lease:
    epoch: int
    term: int
    end_boottime_ns: int


def boottime_ns() -> int:
    """Nanoseconds on the clock that leases are measured on; it goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class LeaseWatch:
    """The newest lease that control granted. Set in one thread, checked in another."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._lease = _Lease(0, 0, 0)
        self._patience_s = patience_s
        self._renewed = threading.Condition()

    def renew(self, epoch: int, term: int, end_boottime_ns: int) -> None:
        """Take in a grant; one of an older (epoch, term) is ignored."""
        with self._renewed:
            if (epoch, term) >= (self._lease.epoch, self._lease.term):
                self._lease = _Lease(epoch, term, end_boottime_ns)
                self._renewed.notify_all()

    @property
    def newest(self) -> tuple[int, int]:
        """The (epoch, term) of the newest grant, whether or not it has run out; (0, 0) before the first."""
        return self._lease.epoch, self._lease.term

    def check(self) -> tuple[int, int]:
        """The (epoch, term) in force; waits a while for one, in which nothing is decoded or emitted.

        Raises `LeaseExpired` when none came: control on a busy machine may be late, but not for ever.
        """
        lease = self._lease
        if boottime_ns() < lease.end_boottime_ns:
            return lease.epoch, lease.term
        with self._renewed:
            self._renewed.wait_for(lambda: boottime_ns() < self._lease.end_boottime_ns, self._patience_s)
            lease = self._lease
        if boottime_ns() >= lease.end_boottime_ns:
            raise LeaseExpired(f"the lease of ({lease.epoch}, {lease.term}) has run out")
        return lease.epoch, lease.term
