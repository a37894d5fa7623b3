"""How a run of several processes is started, said in a line that can be typed, and how it ends.

torchrun stops its ranks by a signal, which it cannot send once it was killed itself: they would
train on and hold the run's folder against the same command. So the kernel is asked to kill a rank
when its parent dies.
"""

import ctypes
import os
import shlex
import signal
import sys

from ms_align.errors import ConfigError

__all__ = ["check_launched", "end_with_launcher"]

PR_SET_PDEATHSIG = 1
PARENT = os.getppid()
"""This process's parent, looked up as early as can be."""


def end_with_launcher() -> None:
    """From now on end as soon as torchrun does; a process that it did not start is left alone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != PARENT:  # it died before the kernel was asked
        os._exit(1)


def check_launched(processes: int) -> None:
    """Refuse a layout of other than the processes that there are.

    Raises:
        ConfigError: gives the line that starts as many.
    """
    there = int(os.environ.get("WORLD_SIZE", "1"))
    if there == processes:
        return
    line = f"torchrun --standalone --nproc-per-node {processes} -m ms_align"
    raise ConfigError(
        f"the layout is for {processes} processes and there are {there}; start it with: "
        f"{line} {shlex.join(sys.argv[1:])}"
    )
