"""Ends a measurement that hangs, as messages over a broken network do, after it has been reported.

A collective library's own timeout ends the process without a word, and what was found before would
be lost.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ms_parallel.entry import FAILED


@contextmanager
def patience(seconds: float, speak: Callable[[], object]) -> Iterator[None]:
    """End this process with exit code 1 if what is done inside takes longer.

    Args:
        seconds: that it may take.
        speak: called before, on another thread.
    """
    done = threading.Event()

    def watch() -> None:
        if done.wait(seconds):
            return
        try:
            speak()
            sys.stdout.flush()
        finally:
            os._exit(FAILED)

    threading.Thread(target=watch, name="ms-parallel-doctor", daemon=True).start()
    try:
        yield
    finally:
        done.set()
