"""Time that a thread spent runnable but waiting for a CPU, from Linux's `schedstat`.

A step that took longer only because the host was busy is not a regression, so `compare` subtracts
this time. One reading takes 3 µs.
"""

import os
import threading


class CpuWait:
    """Measure the calling thread's CPU wait, where the kernel counts it."""

    def __init__(self) -> None:
        self._thread = 0
        self._descriptor = -1
        self._last_ns = 0

    def since_last_ns(self) -> int | None:
        """Return the wait in ns since this thread's last call; None on its first or if unknown."""
        try:
            first = self._thread != threading.get_native_id()
            if first:
                self._open()
            # schedstat: ns on a CPU, ns runnable but waiting for one, number of time slices.
            waited_ns = int(os.pread(self._descriptor, 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return None
        last_ns, self._last_ns = self._last_ns, waited_ns
        return None if first else waited_ns - last_ns

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._thread = -1, 0

    def _open(self) -> None:
        self.close()
        self._thread = threading.get_native_id()
        path = f"/proc/self/task/{self._thread}/schedstat"
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
