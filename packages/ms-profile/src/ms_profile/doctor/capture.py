"""Record this machine: facts of the process, files of the kernel, and the vendors' tools."""

import ctypes
import importlib.metadata
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ms_profile.doctor.limits import (
    CGROUP_FILE,
    LIMITS_FILE,
    LOAD,
    ONLINE_CORES,
    group_files,
    memory_limit,
    quota_files,
)
from ms_profile.doctor.recording import NO_ANSWER, Accelerator, Machine, MachineRecording
from ms_profile.doctor.vendor_tools import (
    CANN_FILE,
    DRIVER_FILE,
    PORT_TOOL,
    npus,
    port_commands,
)
from ms_profile.errors import number_in_environment
from ms_profile.recording.plan import ProcessRank

LIMIT_BYTES = 1 << 20
"""Maximum bytes recorded of a file or output."""
TIMEOUT_S = 20.0
"""Time limit of a tool, as it may hang with its driver."""
MACHINE_FILES = (
    "proc/modules",
    DRIVER_FILE,
    "etc/nccl.conf",
    CGROUP_FILE,
    LOAD,
    ONLINE_CORES,
    "sys/class/net/*/operstate",
    "sys/class/net/*/mtu",
    "sys/class/infiniband/*/hca_type",
    "sys/class/infiniband/*/ports/*/state",
    "sys/class/infiniband/*/ports/*/phys_state",
    "sys/class/infiniband/*/ports/*/rate",
    "sys/class/infiniband/*/ports/*/link_layer",
    "sys/class/infiniband/*/device/net/*/mtu",
    "sys/class/infiniband/*/device/current_link_speed",
    "sys/class/infiniband/*/device/max_link_speed",
    "sys/class/infiniband/*/device/current_link_width",
    "sys/class/infiniband/*/device/max_link_width",
    CANN_FILE,
    "usr/local/Ascend/ascend-toolkit/latest/*-linux/ascend_toolkit_install.info",
)
"""Files; `*` matches any name."""
NAMES_ONLY = ("dev/infiniband/*",)
"""Files recorded by name only."""
COMMANDS = (("ibstat",), ("ibv_devinfo",), ("nvidia-smi", "-q"), ("npu-smi", "info"))
TOOL_PATHS = {PORT_TOOL: "/usr/local/Ascend/driver/tools/hccn_tool"}
"""Paths of tools that are not on PATH."""


PACKAGES = (
    "ms-profile",
    "ms-parallel",
    "ms-data",
    "ms-kernels",
    "torch",
    "torch-npu",
    "triton",
    "safetensors",
    "tokenizers",
)
BACKENDS = ("gloo", "nccl", "hccl", "xccl")
PREFIXES = ("NCCL_", "HCCL_", "GLOO_", "TORCH_NCCL_", "UCX_", "ASCEND_RT_", "OMP_NUM_")
NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
)
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Substrings of names of variables that are never recorded."""


def capture(root: Path = Path("/"), *, with_machine: bool | None = None) -> MachineRecording:
    """Record this process and its machine.

    Args:
        root: root of the file system.
        with_machine: record the machine too; by default on the first process of a machine.
    """
    machine = this_machine()
    files = dict(_files(root, LIMITS_FILE))
    if not (machine.local_rank == 0 if with_machine is None else with_machine):
        return MachineRecording(machine=machine, files=files)
    files |= {path: text for pattern in MACHINE_FILES for path, text in _files(root, pattern)}
    # The paths of this process's control group limits are known only now.
    groups = files.get(CGROUP_FILE, "")
    group_paths = [path for pair in group_files(groups) for path in pair] + quota_files(groups)
    files |= {path: text for path in group_paths for path, text in _files(root, path)}
    # Device files: reading one would open the device.
    files |= {path: "" for pattern in NAMES_ONLY for path in _paths(root, pattern)}
    nccl_file = _text(Path.home() / ".nccl.conf")
    files |= {} if nccl_file is None else {"home/.nccl.conf": nccl_file}
    # CANN may have the file in a folder named after the processor's architecture only.
    for path in [path for path in files if path.endswith(f"-linux/{Path(CANN_FILE).name}")]:
        files.setdefault(CANN_FILE, files[path])
    commands = _outputs(COMMANDS)
    numbers = [npu.number for npu in npus(MachineRecording(commands=commands))]
    commands |= _outputs([command for number in numbers for command in port_commands(number)])
    return MachineRecording(machine=machine, files=files, commands=commands)


def memory_bytes(machine: Machine, root: Path = Path("/")) -> int:
    """Memory available to a machine's processes: physical, or less by control group.

    Args:
        machine: facts of this process.
        root: root of the file system.
    """
    groups = _text(root / CGROUP_FILE) or ""
    paths = [path for pair in group_files(groups) for path in pair]
    files = {path: text for path in paths for path, text in _files(root, path)}
    limit = memory_limit(MachineRecording(files={**files, CGROUP_FILE: groups}))
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
        # O_NONBLOCK: opening a pipe without a writer would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            return file.read(LIMIT_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None


def _outputs(commands: Sequence[Sequence[str]]) -> dict[str, str]:
    outputs: dict[str, str] = {}
    hanging: set[str] = set()
    for words in commands:
        tool = shutil.which(words[0]) or TOOL_PATHS.get(words[0], "")
        if words[0] in hanging or not os.access(tool, os.X_OK):
            continue
        answer = _output(tool, words[1:])
        if answer is None:  # its driver hangs, and so would every further query
            hanging.add(words[0])
        outputs[" ".join(words)] = NO_ANSWER if answer is None else answer
    return outputs


def _output(tool: str, words: Sequence[str]) -> str | None:
    """Run a tool; return its output, or the error if it cannot be run; None if it hangs."""
    try:
        run = subprocess.run(
            [tool, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},  # the output is parsed, so it must not be translated
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    return run.stdout[:LIMIT_BYTES].decode(errors="replace")


def this_machine() -> Machine:
    """Collect the facts of this machine, without side effects."""
    process = ProcessRank.from_environment()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return Machine(
        rank=process.rank,
        local_rank=process.local_rank,
        node=number_in_environment("GROUP_RANK", number_in_environment("SLURM_NODEID", 0)),
        host=socket.gethostname(),
        python=sys.version.split()[0],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        affinity=sorted(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        free_disk_bytes=shutil.disk_usage(".").free,
        shared_memory_bytes=_disk_bytes("/dev/shm"),
        accelerators=[] if accelerator is None else _accelerators(accelerator),
        device="cpu" if accelerator is None else accelerator.type,
        backends=[name for name in BACKENDS if _has_backend(name)],
        torchrun=shutil.which("torchrun"),
        packages={name: _version(name) for name in PACKAGES},
        torch_cuda=torch.version.cuda,
        libraries=_libraries(),
        environment=_environment(os.environ),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _accelerators(device: torch.device) -> list[Accelerator]:
    module = torch.get_device_module(device)
    accelerators = []
    for index in range(torch.accelerator.device_count()):
        properties = module.get_device_properties(index)
        memory = int(getattr(properties, "total_memory", 0))
        accelerators.append(Accelerator(name=str(properties.name), memory_bytes=memory))
    return accelerators


def _has_backend(name: str) -> bool:
    check = getattr(dist, f"is_{name}_available", None)
    return dist.is_backend_available(name) if check is None else bool(check())


def _libraries() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"nccl": None, "ibverbs": None}
    if dist.is_nccl_available():
        versions["nccl"] = ".".join(map(str, _nccl_version()))
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
        versions["ibverbs"] = "1"
    return versions


def _nccl_version() -> tuple[int, ...]:
    from torch.cuda import nccl

    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return version


def _disk_bytes(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in NAMES or name.startswith(PREFIXES)) and not any(s in name for s in SECRET)
    }
