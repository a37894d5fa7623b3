"""Reads rank, world size and meeting place from a cluster's scheduler.

`srun` starts every rank itself and sets SLURM_* alone: such a process is not alone, and must not
train as if it were. Its number, the number of all and the first node of the step say all that
torchrun would have said.
"""

import os
import re

from ms_parallel.cluster.process import VARIABLES, launched, variable
from ms_parallel.errors import LaunchError

PORTS = range(20_000, 32_000)
"""Below those that Linux gives to outgoing connections."""
COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Set by launchers that start many processes without saying where they meet."""


def adopt_scheduler() -> None:
    """Take over rank, number of processes and meeting place from `srun`, where it started this.

    Raises:
        LaunchError: a launcher started several processes and does not say where they meet.
    """
    if launched():
        return
    if variable("WORLD_SIZE", 1) > 1 or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        _check_alone()
        return
    if "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        _adopt_step()
        return
    for name in COUNTS:
        if variable(name, 1) > 1:
            raise LaunchError(
                f"{name} is {os.environ[name]} but nothing says where the processes meet; start"
                " them by `srun COMMAND` or `torchrun --nproc-per-node N COMMAND`, or unset"
                f" {name} to train with this process alone"
            )


def _check_alone() -> None:
    """Refuse to train alone as one of several processes that cannot meet."""
    size = variable("WORLD_SIZE")
    missing = " and ".join(name for name in VARIABLES if name not in os.environ)
    if size > 1:
        raise LaunchError(
            f"WORLD_SIZE is {size} and {missing} not set, so the processes cannot meet; start them"
            " by `torchrun --nproc-per-node N COMMAND`, or unset RANK and WORLD_SIZE to train with"
            " this process alone"
        )


def _adopt_step() -> None:
    size = variable("SLURM_STEP_NUM_TASKS", variable("SLURM_NTASKS", 1))
    if size == 1:
        return
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    job, step = variable("SLURM_JOB_ID", 0), variable("SLURM_STEP_ID", 0)
    os.environ.setdefault("MASTER_ADDR", first_node(nodes))
    os.environ.setdefault("MASTER_PORT", str(PORTS[(131 * job + step) % len(PORTS)]))
    os.environ["RANK"] = str(variable("SLURM_PROCID", 0))
    os.environ["WORLD_SIZE"] = str(size)
    os.environ.setdefault("LOCAL_RANK", str(variable("SLURM_LOCALID", 0)))


def first_node(nodes: str) -> str:
    """Return the first host of a list of SLURM's.

    >>> first_node("gpu[007-009,012],big1")
    'gpu007'

    Raises:
        LaunchError: there is none.
    """
    found = re.match(r"([A-Za-z0-9_.-]+)(?:\[([0-9]+)[^\]]*\]([A-Za-z0-9_.-]*))?", nodes.strip())
    if found is None:
        raise LaunchError(
            f"SLURM's list of nodes is {nodes!r}; set MASTER_ADDR to the host of rank 0"
        )
    return "".join(part for part in found.groups() if part)
