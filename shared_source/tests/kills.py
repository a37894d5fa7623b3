"""Kill a piece of code before any of its changes to the file system."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CHANGES = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
"""Audit events before a change to the file system."""


def killed_at(event: int, act: Callable[[], object]) -> bool:
    """Run `act` in a child process that kills itself before its n-th change.

    Args:
        event: number of the change, from 1.
        act: code to run; the child shares no memory with this process.

    Returns:
        False if `act` ended before that change.
    """
    child = os.fork()
    if not child:
        remaining = event

        def hook(name: str, _: Any) -> None:
            nonlocal remaining
            if name in CHANGES:
                remaining -= 1
                if not remaining:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            act()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
