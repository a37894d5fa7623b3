"""Pairs of readings of a process's monotonic and wall clock, to convert times between them.

The monotonic clock orders events and never jumps; the wall clock is used in Kineto's traces and is
comparable across hosts. A pair is taken by reading the monotonic clock before and after the wall
clock, so the error of the pair is at most half the gap.
"""

import time
from collections.abc import Callable

from msgspec import Struct

from ms_profile.arguments import check_callable, check_integer
from ms_profile.errors import ClockError

Clock = Callable[[], int]


class ClockPair(Struct, frozen=True, array_like=True):
    """Readings of the monotonic and the wall clock at the same time."""

    monotonic_ns: int
    """Reading of `time.monotonic_ns`."""
    wall_ns: int
    """Reading of `time.time_ns`: nanoseconds since 1970."""
    error_ns: int
    """Largest possible time between the two readings."""

    @property
    def offset_ns(self) -> int:
        """Offset to add to a monotonic time to get its wall-clock time."""
        return self.wall_ns - self.monotonic_ns

    def wall_of(self, monotonic_ns: int) -> int:
        """Convert a time of this process's monotonic clock to wall-clock time, in ns."""
        return monotonic_ns + self.offset_ns

    def monotonic_of(self, wall_ns: int) -> int:
        """Convert a wall-clock time to this process's monotonic clock, in ns."""
        return wall_ns - self.offset_ns


def read_clocks(
    tries: int = 5, *, monotonic: Clock = time.monotonic_ns, wall: Clock = time.time_ns
) -> ClockPair:
    """Read both clocks `tries` times and return the pair with the smallest error.

    Raises:
        ClockError: tries is not an integer >= 1, or a clock is not callable.
    """
    check_integer("tries", tries, minimum=1, error=ClockError)
    check_callable("monotonic", monotonic, error=ClockError)
    check_callable("wall", wall, error=ClockError)
    best: ClockPair | None = None
    for _ in range(tries):
        before = monotonic()
        wall_ns = wall()
        gap = monotonic() - before
        # The midpoint is off by at most half the gap; 1 ns covers the rounding down.
        if best is None or gap // 2 + 1 < best.error_ns:
            best = ClockPair(before + gap // 2, wall_ns, gap // 2 + 1)
    assert best is not None
    return best
