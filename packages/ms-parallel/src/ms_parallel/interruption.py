# A copy of shared_source/interruption.py, made by `nox -s copies`; change it there.
"""What ends a run from outside: a signal, or the end of torchrun.

torchrun stops its ranks by a signal, which it cannot send once it was killed itself: they would
train on, and hold the run's folder against the same command. So the kernel is asked to kill this
process when its parent dies (PR_SET_PDEATHSIG, kept by a thread, so the one that trains must ask).
A process that was orphaned before it could ask finds out by comparing parents afterwards. Only the
milliseconds before this module is imported are left: the launcher's store is gone then, and the
process meets nobody. Systems without such a request have `launcher_is_gone`, asked now and then.

Done by the command and the trainer in a rank of torchrun, never by an import: a process that a
shell started in the background is to outlive its shell.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from .entry import FAILED

PR_SET_PDEATHSIG = 1
STARTED = (os.getpid(), os.getppid())
"""This process and its parent, as early as can be."""


def started_by_torchrun() -> bool:
    """Return whether this process is a rank of torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """End from now on as soon as torchrun does; a process that it did not start is left alone."""
    if not started_by_torchrun():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if launcher_is_gone():
        os._exit(FAILED)


def launcher_is_gone() -> bool:
    """Return whether the torchrun that started this process has ended, which changes its parent."""
    process, parent = STARTED  # a fork of this process has another parent by right
    return started_by_torchrun() and os.getpid() == process and os.getppid() != parent


class StopSignal:
    """Whether this process was asked to stop: by SIGTERM, or by Ctrl-C once."""

    def __init__(self) -> None:
        self.signal_name = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals instead of dying of them; a second Ctrl-C ends the run at once."""
        try:
            before = {
                number: signal.signal(number, self._take)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
        except ValueError:  # signals can be taken in the main thread alone
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.signal_name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
