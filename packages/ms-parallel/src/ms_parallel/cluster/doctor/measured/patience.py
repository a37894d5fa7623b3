"""Watchdog for measurements that hang on a broken network.

A collective library's own timeout would end the process silently and lose the results so far.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ms_parallel.entry import FAILED


@contextmanager
def watchdog(seconds: float, report: Callable[[], object]) -> Iterator[None]:
    """End this process with exit code 1 if the block takes too long.

    Args:
        seconds: time limit.
        report: called before, on another thread.
    """
    done = threading.Event()

    def watch() -> None:
        if done.wait(seconds):
            return
        try:
            report()
            sys.stdout.flush()
        finally:
            os._exit(FAILED)

    threading.Thread(target=watch, name="ms-parallel-doctor", daemon=True).start()
    try:
        yield
    finally:
        done.set()
