"""What a process takes of its machine, read now and then from Linux and from torch."""

import os
import resource
import sys
import time
from pathlib import Path

from ms_profile.trackers.destination import Point

STATM = Path("/proc/self/statm")
FOREVER_S = 3600.0


class SystemMeter:
    """Reads resident memory, processor time and accelerator memory at intervals.

    Args:
        interval_s: seconds between readings; None for none.
    """

    def __init__(self, interval_s: float | None) -> None:
        self._interval_s = interval_s
        self._wall_s, self._used_s = time.monotonic(), _used_s()

    @property
    def rest_s(self) -> float:
        """Seconds until the next reading."""
        if self._interval_s is None:
            return FOREVER_S
        return max(0.01, self._wall_s + self._interval_s - time.monotonic())

    def read(self, step: int | None) -> list[Point]:
        """Return one point of `step` if a reading is due, else none.

        `system/processors` is how many processors the process and its ended children kept busy
        since the reading before, `system/memory_bytes` its resident memory, and
        `system/accelerator_bytes` what torch has allocated on the current accelerator.
        """
        now_s = time.monotonic()
        if self._interval_s is None or step is None or now_s < self._wall_s + self._interval_s:
            return []
        used_s = _used_s()
        busy = (used_s - self._used_s) / (now_s - self._wall_s)
        self._wall_s, self._used_s = now_s, used_s
        numbers: dict[str, float] = {"system/processors": busy}
        if STATM.exists():
            pages = int(STATM.read_text().split()[1])
            numbers["system/memory_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        # Another thread may be importing torch at this moment.
        accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
        if accelerator is not None and accelerator.is_available():
            numbers["system/accelerator_bytes"] = accelerator.memory_allocated()
        return [Point(kind="system", step=step, wall_s=time.time(), numbers=numbers)]


def _used_s() -> float:
    """Sum the processor seconds of this process and of its children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))
