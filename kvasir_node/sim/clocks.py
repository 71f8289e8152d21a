"""The clocks of a simulated machine: one that only runs forward, one that may be wrong, both made up.

Real time is the simulation's own count of nanoseconds. A machine's instant clock runs a little fast or slow
(it counts suspend, as `CLOCK_BOOTTIME` does, and starts again when the machine boots); its wall clock is off
and may be set while the node runs. All in whole numbers, so that two runs agree in every digit.
It knows no node and no event.
"""

from __future__ import annotations

from typing import Final

from kvasir_proto.effects import Now
from kvasir_proto.instants import Duration, Instant, WallTime

WALL_START: Final = WallTime(1_800_000_000 * 1_000_000_000)
"""What a correct wall clock shows when a simulation starts."""
_MILLION: Final = 1_000_000
_BOOT: Final = Instant(0)
_RIGHT: Final = Duration(0)


class NodeClock:
    """The two clocks of one machine, by real time in nanoseconds since the simulation began."""

    __slots__ = ("_base_instant", "_base_real", "_rate", "_skew")

    def __init__(self, start: Instant = _BOOT, drift_ppm: int = 0, skew: Duration = _RIGHT) -> None:
        self._base_real = 0
        self._base_instant = int(start)
        self._rate = _MILLION + drift_ppm
        self._skew = int(skew)

    @property
    def drift_ppm(self) -> int:
        """How much faster than real time the instant clock runs, in millionths."""
        return self._rate - _MILLION

    @property
    def skew(self) -> Duration:
        """How far the wall clock is ahead of the right time."""
        return Duration(self._skew)

    def now(self, real: int) -> Now:
        """What both clocks show at this real time."""
        return Now(self.instant(real), WallTime(WALL_START + real + self._skew))

    def wall(self, real: int) -> WallTime:
        """What the wall clock shows at this real time."""
        return WallTime(WALL_START + real + self._skew)

    def instant(self, real: int) -> Instant:
        """What the instant clock shows at this real time."""
        return Instant(self._base_instant + (real - self._base_real) * self._rate // _MILLION)

    def real_of(self, instant: Instant) -> int:
        """The first real time at which the instant clock shows `instant` or later, if nothing changes."""
        return self._base_real - (self._base_instant - instant) * _MILLION // self._rate

    def set_drift(self, real: int, drift_ppm: int) -> None:
        """From this real time on the instant clock runs at another speed; it does not jump."""
        self._base_instant, self._base_real = self.instant(real), real
        self._rate = _MILLION + drift_ppm

    def step_wall(self, by: Duration) -> None:
        """Somebody, or NTP, sets the wall clock."""
        self._skew += by

    def boot(self, real: int) -> None:
        """The machine starts anew: the instant clock counts from its boot."""
        self._base_instant, self._base_real = 0, real
