"""Checks the number of processes of a run."""

import os
import shlex
import sys

from ms_align.errors import ConfigError


def check_launched(processes: int) -> None:
    """Check that the number of processes matches the layout.

    Raises:
        ConfigError: it does not; the message has the torchrun command.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == processes:
        return
    line = f"torchrun --standalone --nproc-per-node {processes} -m ms_align"
    raise ConfigError(
        f"the layout needs {processes} processes and {world_size} are running; start it with: "
        f"{line} {shlex.join(sys.argv[1:])}"
    )
