"""CPU and memory usage of this process, read periodically from Linux and torch."""

import os
import resource
import sys
import time
from pathlib import Path

from ms_profile.trackers.destination import Point

STATM = Path("/proc/self/statm")
FOREVER_S = 3600.0


class SystemMeter:
    """Read resident memory, CPU usage and accelerator memory at intervals.

    Args:
        interval_s: seconds between readings. None: never.
    """

    def __init__(self, interval_s: float | None) -> None:
        self._interval_s = interval_s
        self._wall_s, self._last_cpu_s = time.monotonic(), _cpu_s()

    @property
    def rest_s(self) -> float:
        """Seconds until the next reading."""
        if self._interval_s is None:
            return FOREVER_S
        return max(0.01, self._wall_s + self._interval_s - time.monotonic())

    def read(self, step: int | None) -> list[Point]:
        """Return a point for `step` if a reading is due, else no point.

        `system/processors` is the mean number of CPUs used by the process and its finished children
        since the last reading, `system/memory_bytes` the resident memory of the process, and
        `system/accelerator_bytes` the memory allocated by torch on the current accelerator.
        """
        now_s = time.monotonic()
        if self._interval_s is None or step is None or now_s < self._wall_s + self._interval_s:
            return []
        cpu_s = _cpu_s()
        processors = (cpu_s - self._last_cpu_s) / (now_s - self._wall_s)
        self._wall_s, self._last_cpu_s = now_s, cpu_s
        numbers: dict[str, float] = {"system/processors": processors}
        if STATM.exists():
            pages = int(STATM.read_text().split()[1])  # second field: resident pages
            numbers["system/memory_bytes"] = pages * os.sysconf("SC_PAGE_SIZE")
        # Read via sys.modules, as another thread may be importing torch right now.
        accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
        if accelerator is not None and accelerator.is_available():
            numbers["system/accelerator_bytes"] = accelerator.memory_allocated()
        return [Point(kind="system", step=step, wall_s=time.time(), numbers=numbers)]


def _cpu_s() -> float:
    """Return the CPU seconds of this process and its finished children."""
    targets = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, targets))
