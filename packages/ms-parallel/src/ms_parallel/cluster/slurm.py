"""Reads rank, world size and rendezvous address from the scheduler of a cluster.

`srun` starts every rank and sets only SLURM_* variables; such a process must not train alone. Its
rank, the number of ranks and the first node of the step replace torchrun's variables.
"""

import os
import re

from ms_parallel.cluster.process import VARIABLES, launched, variable
from ms_parallel.errors import LaunchError

PORTS = range(20_000, 32_000)
"""Ports below the range that Linux uses for outgoing connections."""
COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
"""Set by launchers that start several processes without a rendezvous address."""


def adopt_scheduler() -> None:
    """Set rank, world size and rendezvous address from `srun`, if it started this process.

    Raises:
        LaunchError: a launcher started several processes without a rendezvous address.
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
                f"{name} is {os.environ[name]} but the rendezvous address is missing; start the"
                " processes with `srun COMMAND` or `torchrun --nproc-per-node N COMMAND`, or unset"
                f" {name} to train with this process only"
            )


def _check_alone() -> None:
    """Raise if WORLD_SIZE is above 1 but the rendezvous address is missing."""
    size = variable("WORLD_SIZE")
    missing = " and ".join(name for name in VARIABLES if name not in os.environ)
    if size > 1:
        raise LaunchError(
            f"WORLD_SIZE is {size} without {missing}, so the processes cannot connect; start"
            " them with `torchrun --nproc-per-node N COMMAND`, or unset RANK and WORLD_SIZE to"
            " train with this process only"
        )


def _adopt_step() -> None:
    # SLURM_NTASKS counts the job's tasks; a step may have fewer.
    size = variable("SLURM_STEP_NUM_TASKS", variable("SLURM_NTASKS", 1))
    if size == 1:
        return
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    job, step = variable("SLURM_JOB_ID", 0), variable("SLURM_STEP_ID", 0)
    os.environ.setdefault("MASTER_ADDR", first_node(nodes))
    # All ranks derive the same port; steps that share a node mostly get different ones.
    os.environ.setdefault("MASTER_PORT", str(PORTS[(131 * job + step) % len(PORTS)]))
    os.environ["RANK"] = str(variable("SLURM_PROCID", 0))
    os.environ["WORLD_SIZE"] = str(size)
    os.environ.setdefault("LOCAL_RANK", str(variable("SLURM_LOCALID", 0)))


def first_node(nodes: str) -> str:
    """First host of a SLURM node list.

    >>> first_node("gpu[007-009,012],big1")
    'gpu007'

    Raises:
        LaunchError: the list is empty.
    """
    match = re.match(r"([A-Za-z0-9_.-]+)(?:\[([0-9]+)[^\]]*\]([A-Za-z0-9_.-]*))?", nodes.strip())
    if match is None:
        raise LaunchError(f"SLURM's node list is {nodes!r}; set MASTER_ADDR to the host of rank 0")
    return "".join(part for part in match.groups() if part)
