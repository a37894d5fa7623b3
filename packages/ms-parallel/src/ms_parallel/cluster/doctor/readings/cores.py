"""Cores available to the processes of a machine, their threads, and the load by other processes.

Only version 2 of control groups is supported.
"""

from collections.abc import Iterator, Sequence
from math import inf
from pathlib import PurePosixPath

from ms_parallel.cluster.doctor.readings.limits import CGROUP_FILE, group_files
from ms_parallel.cluster.doctor.readings.number import parse_int
from ms_parallel.cluster.doctor.recording.recording import Recording

LOAD, ONLINE = "proc/loadavg", "sys/devices/system/cpu/online"
QUOTA = "cpu.max"
MEMORY_MAX = "memory.max"
"""File in the same folder of each control group."""


def threads_of(recording: Recording) -> int:
    """Number of computing threads of a rank; 0 if unknown."""
    return (
        recording.machine.threads
        or parse_int(recording.machine.environment.get("OMP_NUM_THREADS"))
        or 0
    )


def sleeps(recording: Recording) -> bool:
    """Return whether waiting OpenMP threads sleep instead of spinning."""
    policy = recording.machine.environment.get("OMP_WAIT_POLICY", "")
    return policy.strip().lower() == "passive" or _spins(recording) == "0"


def cores_of(machine: Recording, ranks: Sequence[Recording]) -> float:
    """Number of cores that a machine's ranks share, within the limits of their control groups.

    Args:
        machine: recording of the machine, with its files.
        ranks: recordings of its ranks; ranks bound to cores have only those.
    """
    numbers = {number for recording in ranks for number in recording.machine.affinity}
    cores = float(len(numbers) or max(recording.machine.cores for recording in ranks))
    return min([cores, *_quotas(machine)])


def busy_cores(machine: Recording, cores: float, ranks: int) -> float:
    """Estimate how many of `cores` are busy with other processes; 0 if the load is unknown.

    Args:
        machine: recording of the machine, with its files.
        cores: cores that the ranks share; other load is assumed to be spread over the machine.
        ranks: number of ranks, which may have been busy themselves.
    """
    load, online = (machine.text(LOAD) or "").split(), _count(machine.text(ONLINE) or "")
    if not load or not online:
        return 0.0
    try:
        busy = max(0.0, float(load[0]) - ranks) * min(1.0, cores / online)
    except ValueError:
        return 0.0
    return busy if busy < inf else 0.0


def quota_files(groups: str) -> list[str]:
    """Files with the CPU quotas of a process's control groups.

    Args:
        groups: content of /proc/self/cgroup.
    """
    limits = (PurePosixPath(limit_file) for limit_file, _ in group_files(groups))
    return [str(limit.with_name(QUOTA)) for limit in limits if limit.name == MEMORY_MAX]


def _quotas(machine: Recording) -> Iterator[float]:
    for path in quota_files(machine.text(CGROUP_FILE) or ""):
        quota, _, period = (machine.text(path) or "").partition(" ")
        quota_us, period_us = parse_int(quota), parse_int(period)
        if quota_us and period_us:
            yield quota_us / period_us


def _spins(recording: Recording) -> str:
    return recording.machine.environment.get("GOMP_SPINCOUNT", "").strip()


def _count(ranges: str) -> int:
    """Count the numbers in a list such as `0-3,8`; 0 if invalid."""
    count = 0
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        begin, end = parse_int(first), parse_int(last or first)
        if begin is None or end is None or end < begin:
            return 0
        count += end - begin + 1
    return count
