"""Processes that do one thing, and may be killed at it."""

import os
import signal
import sys
from collections.abc import Callable

__all__ = ["die", "die_at_change", "ended", "started"]

CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir"}


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


def die_at_change(number: int) -> None:
    """Be killed before this process's n-th change of files: create, rename or remove."""
    left = number

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if event in CHANGES or writes:
            left -= 1
            if left < 0:
                die()

    sys.addaudithook(watch)  # it stays, so this is for a process of its own
