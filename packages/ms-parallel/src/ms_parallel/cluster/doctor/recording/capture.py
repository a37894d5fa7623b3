"""Records this machine: reads its files and runs its reporting tools."""

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ms_parallel.cluster.doctor.readings.ascend import TOOL, npus, port_questions
from ms_parallel.cluster.doctor.readings.cores import LOAD, ONLINE, quota_files
from ms_parallel.cluster.doctor.readings.limits import CGROUP_FILE, group_files, memory_limit
from ms_parallel.cluster.doctor.recording.machine import this_machine
from ms_parallel.cluster.doctor.recording.recording import NO_ANSWER, Machine, Recording

LIMIT_BYTES = 1 << 20
"""Maximum bytes recorded of a file or output."""
TIMEOUT_S = 20.0
"""Time limit of a tool, as it may hang with its driver."""
RANK_FILES = ("proc/self/limits",)
MACHINE_FILES = (
    "proc/modules",
    "proc/driver/nvidia/version",
    "etc/nccl.conf",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.current",
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
    "sys/fs/cgroup/memory/memory.usage_in_bytes",
    CGROUP_FILE,
    LOAD,
    ONLINE,
    "sys/class/net/*/operstate",
    "sys/class/net/*/mtu",
    "sys/class/net/*/speed",
    "sys/class/infiniband/*/hca_type",
    "sys/class/infiniband/*/fw_ver",
    "sys/class/infiniband/*/ports/*/state",
    "sys/class/infiniband/*/ports/*/phys_state",
    "sys/class/infiniband/*/ports/*/rate",
    "sys/class/infiniband/*/ports/*/link_layer",
    "sys/class/infiniband/*/device/net/*/mtu",
    "sys/class/infiniband/*/device/current_link_speed",
    "sys/class/infiniband/*/device/max_link_speed",
    "sys/class/infiniband/*/device/current_link_width",
    "sys/class/infiniband/*/device/max_link_width",
    "usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info",
    "usr/local/Ascend/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info",
    "usr/local/Ascend/driver/version.info",
)
"""Files; `*` matches any name."""
NAMES_ONLY = ("dev/infiniband/*",)
"""Files recorded by name only."""
COMMANDS = (
    ("ibstat",),
    ("ibv_devinfo",),
    ("nvidia-smi", "-q"),
    ("npu-smi", "info"),
)
TOOL_PATHS = {TOOL: "/usr/local/Ascend/driver/tools/hccn_tool"}
"""Paths of tools that are not on PATH."""
INSTALL_INFO = "ascend_toolkit_install.info"


def capture(root: Path = Path("/"), *, with_machine: bool | None = None) -> Recording:
    """Record this process and its machine.

    Args:
        root: root of the file system.
        with_machine: record the machine too; by default on the first process of a machine.
    """
    machine = this_machine()
    with_machine = machine.local_rank == 0 if with_machine is None else with_machine
    patterns = (*RANK_FILES, *(MACHINE_FILES if with_machine else ()))
    files = {path: text for pattern in patterns for path, text in _files(root, pattern)}
    if not with_machine:
        return Recording(machine=machine, files=files)
    groups = group_files(files.get(CGROUP_FILE, ""))
    for path in (path for pair in groups for path in pair):
        files |= dict(_files(root, path))
    for path in quota_files(files.get(CGROUP_FILE, "")):
        files |= dict(_files(root, path))
    files |= {path: "" for pattern in NAMES_ONLY for path in _paths(root, pattern)}
    files |= _user_files(machine)
    for path in [path for path in files if path.endswith(f"-linux/{INSTALL_INFO}")]:
        files.setdefault(f"{path.rsplit('/', 2)[0]}/{INSTALL_INFO}", files[path])
    commands = _outputs(COMMANDS)
    numbers = [npu.number for npu in npus(Recording(commands=commands))]
    commands |= _outputs([question for number in numbers for question in port_questions(number)])
    return Recording(machine=machine, files=files, commands=commands)


def memory_bytes(machine: Machine, root: Path = Path("/")) -> int:
    """Memory available to a machine's processes: physical, or less by control group.

    Args:
        machine: facts of this process.
        root: root of the file system.
    """
    groups = group_files(_text(root / CGROUP_FILE) or "")
    files = {path: _text(root / path) or "" for pair in groups for path in pair}
    files[CGROUP_FILE] = _text(root / CGROUP_FILE) or ""
    limit = memory_limit(Recording(files=files))
    return machine.memory_bytes if limit is None else min(machine.memory_bytes, limit[0])


def _paths(root: Path, pattern: str) -> Iterator[str]:
    with suppress(OSError):
        for path in sorted(root.glob(pattern)):
            yield str(path.relative_to(root))


def _files(root: Path, pattern: str) -> Iterator[tuple[str, str]]:
    for path in _paths(root, pattern):
        text = _text(root / path)
        if text is not None:
            yield path, text


def _text(path: Path) -> str | None:
    """Read the beginning of a file; None if it is not a regular, readable file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return file.read(LIMIT_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None


def _user_files(machine: Machine) -> dict[str, str]:
    """Read NCCL's configuration in the user's home."""
    text = _text(Path.home() / ".nccl.conf")
    return {} if text is None else {"home/.nccl.conf": text}


def _outputs(commands: Sequence[Sequence[str]]) -> dict[str, str]:
    outputs: dict[str, str] = {}
    hung: set[str] = set()
    for words in commands:
        tool = shutil.which(words[0]) or TOOL_PATHS.get(words[0], "")
        if words[0] in hung or not os.access(tool, os.X_OK):
            continue
        answer = _output(tool, words[1:])
        if answer is None:  # its driver hangs, and would for every further query
            hung.add(words[0])
        outputs[" ".join(words)] = NO_ANSWER if answer is None else answer
    return outputs


def _output(tool: str, words: Sequence[str]) -> str | None:
    """Run a tool; return its output or the error that it cannot be run, None if it hangs."""
    try:
        run = subprocess.run(
            [tool, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    return run.stdout[:LIMIT_BYTES].decode(errors="replace")
