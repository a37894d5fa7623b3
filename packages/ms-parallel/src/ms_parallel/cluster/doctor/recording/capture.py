"""Records this machine: reads its files and runs the tools that report on it."""

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ms_parallel.cluster.doctor.readings.ascend import TOOL, npus, port_questions
from ms_parallel.cluster.doctor.readings.limits import OF_GROUPS, group_files, memory_limit
from ms_parallel.cluster.doctor.recording.machine import this_machine
from ms_parallel.cluster.doctor.recording.recording import NO_ANSWER, Machine, Recording

LIMIT_BYTES = 1 << 20
"""Most of a file or an output that is recorded."""
PATIENCE_S = 20.0
"""Seconds that a tool may take; drivers that hang are not waited for."""
OF_A_RANK = ("proc/self/limits",)
OF_A_MACHINE = (
    "proc/modules",
    "proc/driver/nvidia/version",
    "etc/nccl.conf",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.current",
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
    "sys/fs/cgroup/memory/memory.usage_in_bytes",
    OF_GROUPS,
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
"""Files, with `*` for any name."""
LISTED = ("dev/infiniband/*",)
"""What is recorded by name alone."""
COMMANDS = (
    ("ibstat",),
    ("ibv_devinfo",),
    ("nvidia-smi", "-q"),
    ("npu-smi", "info"),
)
PLACES = {TOOL: "/usr/local/Ascend/driver/tools/hccn_tool"}
"""Where tools are that are not on PATH."""
INSTALLED = "ascend_toolkit_install.info"


def capture(root: Path = Path("/"), *, whole: bool | None = None) -> Recording:
    """Record this process, and its machine.

    Args:
        root: where the files are.
        whole: whether to record the machine too; by default the first process of a machine does.
    """
    machine = this_machine()
    whole = machine.local_rank == 0 if whole is None else whole
    patterns = (*OF_A_RANK, *(OF_A_MACHINE if whole else ()))
    files = {path: text for pattern in patterns for path, text in _files(root, pattern)}
    if not whole:
        return Recording(machine=machine, files=files)
    groups = group_files(files.get(OF_GROUPS, ""))
    for path in (path for pair in groups for path in pair):
        files |= dict(_files(root, path))
    files |= {path: "" for pattern in LISTED for path in _paths(root, pattern)}
    files |= _own_files(machine)
    for path in [path for path in files if path.endswith(f"-linux/{INSTALLED}")]:
        files.setdefault(f"{path.rsplit('/', 2)[0]}/{INSTALLED}", files[path])
    commands = _outputs(COMMANDS)
    numbers = [npu.number for npu in npus(Recording(commands=commands))]
    commands |= _outputs([question for number in numbers for question in port_questions(number)])
    return Recording(machine=machine, files=files, commands=commands)


def memory_bytes(machine: Machine, root: Path = Path("/")) -> int:
    """Find what a machine's processes may take: its memory, or less by their control group.

    Args:
        machine: facts of this process.
        root: where the files are.
    """
    groups = group_files(_text(root / OF_GROUPS) or "")
    files = {path: _text(root / path) or "" for pair in groups for path in pair}
    files[OF_GROUPS] = _text(root / OF_GROUPS) or ""
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
    """Read the beginning of a file; None if it cannot be read, as the kernel refuses for some."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return file.read(LIMIT_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None


def _own_files(machine: Machine) -> dict[str, str]:
    """Read the user's own settings of NCCL at home, if there are any."""
    text = _text(Path.home() / ".nccl.conf")
    return {} if text is None else {"home/.nccl.conf": text}


def _outputs(commands: Sequence[Sequence[str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    hangs: set[str] = set()
    for words in commands:
        place = shutil.which(words[0]) or PLACES.get(words[0], "")
        if words[0] in hangs or not os.access(place, os.X_OK):
            continue
        answer = _output(place, words[1:])
        if answer is None:  # its driver hangs: it would for each further question too
            hangs.add(words[0])
        found[" ".join(words)] = NO_ANSWER if answer is None else answer
    return found


def _output(place: str, words: Sequence[str]) -> str | None:
    """Return what a tool prints, or why it cannot be run; None where it does not answer."""
    try:
        run = subprocess.run(
            [place, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    return run.stdout[:LIMIT_BYTES].decode(errors="replace")
