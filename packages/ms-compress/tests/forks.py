"""Forked processes that run one function and may be killed in it."""

import os
import signal
import sys
from collections.abc import Callable

__all__ = ["die", "die_at_change", "exit_status", "fork"]

CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir"}


def fork(act: Callable[[], object]) -> int:
    """Fork a process that runs only this function; return its pid. Exit status 1 if it raises."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return child


def exit_status(child: int) -> int:
    """Wait for a process; return its status, or the negative signal number if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_: object, **__: object) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_change(number: int) -> None:
    """Kill this process before its n-th file operation: create, rename or remove."""
    remaining = number

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal remaining
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if event in CHANGES or writes:
            remaining -= 1
            if remaining < 0:
                die()

    sys.addaudithook(watch)  # hooks cannot be removed, so call this only in a forked process
