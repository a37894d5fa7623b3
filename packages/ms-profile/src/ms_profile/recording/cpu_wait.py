"""How long a thread was ready to run while other processes had the CPUs, as Linux counts it.

A step that took longer because the host was busy is no slower step: `compare` leaves this time out.
Reading it takes 3 µs.
"""

import os
import threading


class CpuWait:
    """Counts the waiting of the thread that calls it, where the kernel does so."""

    def __init__(self) -> None:
        self._thread = 0
        self._descriptor = -1
        self._last_ns = 0

    def since_last_ns(self) -> int | None:
        """Measure the wait in ns since this thread's last call; None at its first or if unknown."""
        try:
            first = self._thread != threading.get_native_id()
            if first:
                self._open()
            waited_ns = int(os.pread(self._descriptor, 64, 0).split()[1])
        except (OSError, IndexError, ValueError):
            return None
        last_ns, self._last_ns = self._last_ns, waited_ns
        return None if first else waited_ns - last_ns

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._thread = -1, 0

    def _open(self) -> None:
        self.close()
        self._thread = threading.get_native_id()
        path = f"/proc/self/task/{self._thread}/schedstat"
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
