"""Cores that the processes of a machine have, the threads that they start, and how busy others are.

What control groups leave is read of version 2 alone.
"""

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import PurePosixPath

from ms_parallel.cluster.doctor.readings.limits import OF_GROUPS, group_files
from ms_parallel.cluster.doctor.readings.number import whole
from ms_parallel.cluster.doctor.recording.recording import Recording

LOAD, ONLINE = "proc/loadavg", "sys/devices/system/cpu/online"
QUOTA = "cpu.max"
OF_MEMORY = "memory.max"
"""The file beside it in each control group."""


def threads_of(at: Recording) -> int:
    """Count the threads that a rank computes with; 0 where it is not known."""
    return at.machine.threads or whole(at.machine.environment.get("OMP_NUM_THREADS")) or 0


def sleeps(at: Recording) -> bool:
    """Return whether threads that wait for one another sleep, and do not spin."""
    policy = at.machine.environment.get("OMP_WAIT_POLICY", "")
    return policy.strip().lower() == "passive" or _spins(at) == "0"


def cores_of(machine: Recording, ranks: Sequence[Recording]) -> float:
    """Count the cores that a machine's ranks share, at most what their control groups allow.

    Args:
        machine: its recording, with the files.
        ranks: the recordings of its ranks; those that are bound to cores of their own share less.
    """
    numbers = {number for one in ranks for number in one.machine.affinity}
    cores = float(len(numbers) or max(one.machine.cores for one in ranks))
    return min([cores, *_quotas(machine)])


def busy_cores(machine: Recording, cores: float, ranks: int) -> float:
    """Estimate how many of `cores` others keep busy, by the load of the last minute; 0 if unknown.

    Args:
        machine: its recording, with the files.
        cores: that the ranks share; others are taken to be on all of the machine's alike.
        ranks: that may have been at work themselves.
    """
    load, online = (machine.text(LOAD) or "").split(), _count(machine.text(ONLINE) or "")
    if not load or not online:
        return 0.0
    try:
        found = max(0.0, float(load[0]) - ranks) * min(1.0, cores / online)
    except ValueError:
        return 0.0
    return found if found < inf else 0.0


def quota_files(groups: str) -> list[str]:
    """List the files with the shares of cores of a process's control groups.

    Args:
        groups: the content of /proc/self/cgroup.
    """
    limits = (PurePosixPath(most) for most, _ in group_files(groups))
    return [str(each.with_name(QUOTA)) for each in limits if each.name == OF_MEMORY]


def _quotas(machine: Recording) -> Iterator[float]:
    for path in quota_files(machine.text(OF_GROUPS) or ""):
        quota, _, period = (machine.text(path) or "").partition(" ")
        share, whole_time = whole(quota), whole(period)
        if share and whole_time:
            yield share / whole_time


def _spins(at: Recording) -> str:
    return at.machine.environment.get("GOMP_SPINCOUNT", "").strip()


def _count(ranges: str) -> int:
    """Count the numbers in a list such as `0-3,8`; 0 for none."""
    found = 0
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        begin, end = whole(first), whole(last or first)
        if begin is None or end is None or end < begin:
            return 0
        found += end - begin + 1
    return found
