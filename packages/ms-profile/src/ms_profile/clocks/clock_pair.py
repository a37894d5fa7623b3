"""Two clocks of one process read as a pair, so that either can be turned into the other.

The monotonic clock orders events and never jumps; the wall clock is what Kineto's traces carry and
what other hosts have too. A pair is read by enclosing the wall clock between two readings of the
monotonic one: the true monotonic instant of the wall reading is then known to within half the gap.
"""

import time
from collections.abc import Callable

from msgspec import Struct

Clock = Callable[[], int]


class ClockPair(Struct, frozen=True, array_like=True):
    """The monotonic and the wall clock at one instant."""

    monotonic_ns: int
    """`time.monotonic_ns` at the instant."""
    wall_ns: int
    """`time.time_ns` at the instant: nanoseconds since 1970."""
    error_ns: int
    """How far apart the two readings can have been."""

    @property
    def offset_ns(self) -> int:
        """What to add to a monotonic instant to get its wall time."""
        return self.wall_ns - self.monotonic_ns

    def wall_of(self, monotonic_ns: int) -> int:
        """Return the wall time, in ns, of an instant of this process's monotonic clock."""
        return monotonic_ns + self.offset_ns

    def monotonic_of(self, wall_ns: int) -> int:
        """Return the instant of the monotonic clock, in ns, of a wall time."""
        return wall_ns - self.offset_ns


def read_clocks(
    tries: int = 5, *, monotonic: Clock = time.monotonic_ns, wall: Clock = time.time_ns
) -> ClockPair:
    """Read both clocks `tries` times and keep the pair with the smallest error."""
    best: ClockPair | None = None
    for _ in range(tries):
        before = monotonic()
        wall_ns = wall()
        gap = monotonic() - before
        if best is None or gap // 2 + 1 < best.error_ns:
            best = ClockPair(before + gap // 2, wall_ns, gap // 2 + 1)
    if best is None:
        raise ValueError(f"tries is {tries}; read the clocks at least once")
    return best
