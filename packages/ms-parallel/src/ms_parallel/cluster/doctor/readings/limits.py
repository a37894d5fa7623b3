"""Limits of a process, as /proc/self/limits lists them, or else `ulimit -a`; and of its memory."""

import re
from math import inf

from ms_parallel.cluster.doctor.readings.number import whole
from ms_parallel.cluster.doctor.recording.recording import Recording

FILE, COMMAND = "proc/self/limits", "ulimit -a"
KIB = 1024
NAMES = {
    "open_files": ("Max open files", "open files", 1),
    "locked_bytes": ("Max locked memory", "max locked memory", KIB),
    "processes": ("Max processes", "max user processes", 1),
}
"""By limit: its name in the file, in the output of `ulimit`, and the unit of the latter."""
OF_GROUPS = "proc/self/cgroup"
MEMORY_FILES = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Limit and use of memory, in either version of control groups."""
MOST_NESTED = 16
WITHOUT_LIMIT = 1 << 62


def limit(at: Recording, name: str) -> float | None:
    """Read the soft limit of a name in `NAMES`; infinite where there is none, None if unknown."""
    in_file, in_output, unit = NAMES[name]
    found = re.search(rf"^{in_file}\s+(\S+)", at.text(FILE) or "", re.MULTILINE)
    if found:
        return _number(found[1], 1)
    found = re.search(rf"^{in_output}\b.*?(\S+)\s*$", at.output(COMMAND) or "", re.MULTILINE)
    return _number(found[1], unit) if found else None


def memory_limit(at: Recording) -> tuple[int, int] | None:
    """Bytes that the tightest control group may take and has taken; None where there is no limit.

    Args:
        at: the machine; a container shows the group of its process as the topmost one.
    """
    found = []
    for most, taken in group_files(at.text(OF_GROUPS) or ""):
        limit_bytes = whole(at.text(most))
        if limit_bytes is not None and limit_bytes < WITHOUT_LIMIT:
            found.append((limit_bytes, whole(at.text(taken)) or 0))
    return min(found, default=None)


def group_files(groups: str) -> list[tuple[str, str]]:
    """List the files of limit and use of a process's memory groups, from the topmost down.

    Args:
        groups: the content of /proc/self/cgroup, lines of `number:controllers:path`.
    """
    found = [(f"{root}/{most}", f"{root}/{taken}") for root, most, taken in MEMORY_FILES]
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = [name for name in path.split("/") if name]
        if controllers not in ("", "memory") or ".." in names:
            continue
        root, most, taken = MEMORY_FILES[controllers == "memory"]
        for depth in range(1, min(len(names), MOST_NESTED) + 1):
            folder = "/".join([root, *names[:depth]])
            found.append((f"{folder}/{most}", f"{folder}/{taken}"))
    return found


def _number(word: str, unit: int) -> float | None:
    if word == "unlimited":
        return inf
    number = whole(word)
    return None if number is None else float(number * unit)
