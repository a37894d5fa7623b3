"""Limits of a process, from /proc/self/limits or `ulimit -a`; and of its memory."""

import re
from math import inf

from ms_parallel.cluster.doctor.readings.number import parse_int
from ms_parallel.cluster.doctor.recording.recording import Recording

FILE, COMMAND = "proc/self/limits", "ulimit -a"
KIB = 1024
NAMES = {
    "open_files": ("Max open files", "open files", 1),
    "locked_bytes": ("Max locked memory", "max locked memory", KIB),
    "processes": ("Max processes", "max user processes", 1),
}
"""Name of each limit in the file and in the output of `ulimit`, and the unit of the latter."""
CGROUP_FILE = "proc/self/cgroup"
MEMORY_FILES = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Memory limit and usage files of both versions of control groups."""
MAX_DEPTH = 16
UNLIMITED = 1 << 62


def limit(recording: Recording, name: str) -> float | None:
    """Soft limit by a name in `NAMES`; infinite if unlimited, None if unknown."""
    in_file, in_output, unit = NAMES[name]
    match = re.search(rf"^{in_file}\s+(\S+)", recording.text(FILE) or "", re.MULTILINE)
    if match:
        return _number(match[1], 1)
    match = re.search(rf"^{in_output}\b.*?(\S+)\s*$", recording.output(COMMAND) or "", re.MULTILINE)
    return _number(match[1], unit) if match else None


def memory_limit(recording: Recording) -> tuple[int, int] | None:
    """Limit and usage in bytes of the tightest control group; None if unlimited.

    Args:
        recording: recording of the machine; in a container, the process's group is the root.
    """
    limits = []
    for limit_file, usage_file in group_files(recording.text(CGROUP_FILE) or ""):
        limit_bytes = parse_int(recording.text(limit_file))
        if limit_bytes is not None and limit_bytes < UNLIMITED:
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
        if controllers not in ("", "memory") or ".." in names:
            continue
        root, limit_file, usage_file = MEMORY_FILES[controllers == "memory"]
        for depth in range(1, min(len(names), MAX_DEPTH) + 1):
            folder = "/".join([root, *names[:depth]])
            files.append((f"{folder}/{limit_file}", f"{folder}/{usage_file}"))
    return files


def _number(word: str, unit: int) -> float | None:
    if word == "unlimited":
        return inf
    number = parse_int(word)
    return None if number is None else float(number * unit)
