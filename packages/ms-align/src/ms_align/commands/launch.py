"""How a run of several processes is started, said in a line that can be typed."""

import os
import shlex
import sys

from ms_align.errors import ConfigError


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
