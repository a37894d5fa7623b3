"""Processes that do one thing, and may be killed at it."""

import os
import signal
from collections.abc import Callable

__all__ = ["die", "ended", "started"]


def started(act: Callable[[], object]) -> int:
    """The number of a process that does this and nothing else; its status is 1 if it raises."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def ended(child: int) -> int:
    """A process's status; the signal's number, negative, if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_: object, **__: object) -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)
