"""Limits of processes: `ulimit`, memory and CPU quotas of their control groups, cores and load."""

import re
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import PurePosixPath
from typing import Final

from ms_profile.doctor.recording import MachineRecording
from ms_profile.doctor.versions import parse_int

LIMITS_FILE: Final = "proc/self/limits"
LIMITS_COMMAND: Final = "ulimit -a"
LIMITS: Final = {
    "open_files": ("Max open files", "open files", 1),
    "locked_bytes": ("Max locked memory", "max locked memory", 1024),
    "processes": ("Max processes", "max user processes", 1),
}
"""Name of each limit in the file and in the output of `ulimit`, and the unit of the latter."""
CGROUP_FILE: Final = "proc/self/cgroup"
MEMORY_FILES: Final = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Memory limit and usage files of versions 2 and 1 of control groups."""
CPU_QUOTA: Final = "cpu.max"
"""CPU quota of a control group; version 2 only."""
LOAD: Final = "proc/loadavg"
ONLINE_CORES: Final = "sys/devices/system/cpu/online"
MAX_DEPTH: Final = 16
UNLIMITED_BYTES: Final = 1 << 62


def limit(recording: MachineRecording, name: str) -> float | None:
    """Soft limit by a name in `LIMITS`; infinite if unlimited, None if unknown."""
    in_file, in_output, unit = LIMITS[name]
    for text, pattern, scale in (
        (recording.text(LIMITS_FILE), rf"^{in_file}\s+(\S+)", 1),
        (recording.output(LIMITS_COMMAND), rf"^{in_output}\b.*?(\S+)\s*$", unit),
    ):
        match = re.search(pattern, text or "", re.MULTILINE)
        if match:
            number = inf if match[1] == "unlimited" else parse_int(match[1])
            return None if number is None else float(number * scale)
    return None


def memory_limit(recording: MachineRecording) -> tuple[int, int] | None:
    """Limit and usage in bytes of the tightest control group; None if unlimited.

    Args:
        recording: recording of the machine; in a container, the process's group is the root.
    """
    limits = []
    for limit_file, usage_file in group_files(recording.text(CGROUP_FILE) or ""):
        limit_bytes = parse_int(recording.text(limit_file))
        if limit_bytes is not None and limit_bytes < UNLIMITED_BYTES:
            # A group is also limited by its parents, so all levels are compared.
            limits.append((limit_bytes, parse_int(recording.text(usage_file)) or 0))
    return min(limits, default=None)


def group_files(groups: str) -> list[tuple[str, str]]:
    """Limit and usage files of a process's memory control groups, from the root down.

    Args:
        groups: content of /proc/self/cgroup, lines of `number:controllers:path`.
    """
    files = [
        (f"{root}/{limit_file}", f"{root}/{usage_file}")
        for root, limit_file, usage_file in MEMORY_FILES
    ]
    for line in groups.splitlines():
        _, _, remainder = line.partition(":")
        controllers, _, path = remainder.partition(":")
        names = [name for name in path.split("/") if name]
        # Version 2 has one line without controllers, version 1 a line per controller.
        if controllers not in ("", "memory") or ".." in names:
            continue
        root, limit_file, usage_file = MEMORY_FILES[controllers == "memory"]
        for depth in range(1, min(len(names), MAX_DEPTH) + 1):
            folder = "/".join([root, *names[:depth]])
            files.append((f"{folder}/{limit_file}", f"{folder}/{usage_file}"))
    return files


def quota_files(groups: str) -> list[str]:
    """Files with the CPU quotas of a process's control groups.

    Args:
        groups: content of /proc/self/cgroup.
    """
    limit_files = (PurePosixPath(limit_file) for limit_file, _ in group_files(groups))
    return [str(path.with_name(CPU_QUOTA)) for path in limit_files if path.name == "memory.max"]


def cores_of(machine: MachineRecording, ranks: Sequence[MachineRecording]) -> float:
    """Number of cores that a machine's ranks share, within the quotas of their control groups.

    Args:
        machine: recording of the machine, with its files.
        ranks: recordings of its ranks; ranks bound to cores have only those.
    """
    numbers = {number for recording in ranks for number in recording.machine.affinity}
    cores = float(len(numbers) or max(recording.machine.cores for recording in ranks))
    return min([cores, *_quotas(machine)])


def _quotas(machine: MachineRecording) -> Iterator[float]:
    for path in quota_files(machine.text(CGROUP_FILE) or ""):
        quota, _, period = (machine.text(path) or "").partition(" ")
        quota_us, period_us = parse_int(quota), parse_int(period)
        if quota_us and period_us:
            yield quota_us / period_us


def busy_cores(machine: MachineRecording, cores: float, ranks: int) -> float:
    """Estimate how many of `cores` are busy with other processes; 0 if the load is unknown.

    Args:
        machine: recording of the machine, with its files.
        cores: cores that the ranks share; other load is assumed to be spread over the machine.
        ranks: number of ranks, which may have been busy themselves.
    """
    load = (machine.text(LOAD) or "").split()
    online = _count_cores(machine.text(ONLINE_CORES) or "")
    if not load or not online:
        return 0.0
    try:
        # The load of the last minute counts runnable threads of the machine, including the ranks.
        busy = max(0.0, float(load[0]) - ranks) * min(1.0, cores / online)
    except ValueError:
        return 0.0
    return busy if busy < inf else 0.0


def _count_cores(ranges: str) -> int:
    """Count the numbers in a list such as `0-3,8`; 0 if invalid."""
    count = 0
    for part in ranges.split(","):
        first, _, last = part.strip().partition("-")
        begin, end = parse_int(first), parse_int(last or first)
        if begin is None or end is None or end < begin:
            return 0
        count += end - begin + 1
    return count


def threads_of(recording: MachineRecording) -> int:
    """Number of computing threads of a rank; 0 if unknown."""
    in_environment = parse_int(recording.machine.environment.get("OMP_NUM_THREADS"))
    return recording.machine.threads or in_environment or 0


def sleeps(recording: MachineRecording) -> bool:
    """Return whether waiting OpenMP threads sleep instead of spinning."""
    variables = recording.machine.environment
    policy = variables.get("OMP_WAIT_POLICY", "").strip().lower()
    return policy == "passive" or variables.get("GOMP_SPINCOUNT", "").strip() == "0"
