"""Checks of a machine: devices, their tools, limits, memory and threads."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from ms_profile.doctor.checks import DoctorFinding, check, failure, minority, warning
from ms_profile.doctor.limits import (
    LIMITS_COMMAND,
    LIMITS_FILE,
    busy_cores,
    cores_of,
    limit,
    memory_limit,
    sleeps,
    threads_of,
)
from ms_profile.doctor.network import has_active_port
from ms_profile.doctor.recording import NO_ANSWER, Examined, MachineRecording
from ms_profile.doctor.vendor_tools import Gpu, gpus, has_ascend, has_nvidia, npus
from ms_profile.doctor.versions import parse_int

GIB: Final = 1 << 30
SLOWDOWN_FACTS: Final = (
    "Clocks Event Reasons / HW Slowdown",
    "Clocks Throttle Reasons / HW Slowdown",
)
BROKEN: Final = ("couldn't communicate with the NVIDIA driver", "Driver/library version mismatch")
"""Messages of nvidia-smi instead of a report."""
MIN_FILES, MIN_PROCESSES, MIN_LOCKED = 4096, 4096, 16 * GIB
MIN_SHARED: Final = GIB
MAX_USED: Final = 0.9  # of the control group's memory limit
MIN_OF_DEVICES: Final = 0.5
"""Minimum memory limit, as a fraction of the memory of the machine's devices."""
SPARE_CORES: Final = 0.5
"""Cores that other processes may use without a warning."""
SPINS: Final = (
    "waiting OpenMP threads spin on cores that the threads they wait for need: steps take many"
    " times as long"
)
TAKE_TURNS: Final = "threads take turns on cores, and finished ones wait for the others"


@check(
    "devices",
    "devices are healthy, and the same on all machines",
    needs=lambda examined: has_nvidia(examined) or has_ascend(examined),
)
def devices(examined: Examined) -> Iterator[DoctorFinding]:
    """Check the reports of the vendors' tools."""
    for machine in examined.machines:
        for gpu in gpus(machine):
            yield from _gpu(machine, gpu)
        for npu in npus(machine):
            if npu.health.upper() != "OK":
                yield failure(
                    machine,
                    f"NPU {npu.number}",
                    what=f"its health is {npu.health}",
                    why="operators fail or give wrong results",
                    remedy=f"npu-smi info -t health -i {npu.number} shows the fault; reset the"
                    " device or have it replaced",
                )
    counts = [_device_counts(machine) for machine in examined.machines]
    for machine, count, majority in minority(examined.machines, counts):
        yield warning(
            machine,
            "devices",
            what=f"it has {count or 'none'}, and most machines have {majority or 'none'}",
            why="with equal shares, fast devices wait for slow ones",
            remedy="exclude the machine, or look for a device that has fallen off the bus",
        )


def _gpu(machine: MachineRecording, gpu: Gpu) -> Iterator[DoctorFinding]:
    current, maximum = (gpu.fact(f"Link Width / {label}") for label in ("Current", "Max"))
    # Unlike the link's generation, its width is not reduced to save power.
    if 0 < _lanes(current) < _lanes(maximum):
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what=f"its PCIe link has {_lanes(current)} of {_lanes(maximum)} lanes",
            why="copies from and to host memory, and messages between machines, are slower",
            remedy="reseat the device; check the slot's firmware settings",
        )
    if gpu.fact(*SLOWDOWN_FACTS) == "Active":
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what="the hardware throttles its clock",
            why="every rank waits for this one",
            remedy="check its temperature and power (nvidia-smi -q -d PERFORMANCE,TEMPERATURE),"
            " the fans and the power supply",
        )
    if gpu.fact("Remapped Rows / Pending", "Retired Pages / Pending Page Blacklist") == "Yes":
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what="memory rows are waiting to be remapped",
            why="an uncorrectable error ends the process that reads such a row",
            remedy="stop all processes on it and reset it: nvidia-smi --gpu-reset -i NUMBER",
        )


def _lanes(text: str) -> int:
    return parse_int(text.rstrip("x")) or 0


def _device_counts(machine: MachineRecording) -> str:
    names = Counter(
        [gpu.fact("Product Name") for gpu in gpus(machine)] + [npu.name for npu in npus(machine)]
    )
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))


@check(
    "tools",
    "the tools of devices and ports respond",
    needs=lambda examined: any(machine.commands for machine in examined.machines),
)
def tools(examined: Examined) -> Iterator[DoctorFinding]:
    """Check for tools that hung, and for those without a working driver."""
    for machine in examined.machines:
        for line, text in machine.commands.items():
            broken = next((words for words in BROKEN if words in text), None)
            if text == NO_ANSWER:
                yield failure(
                    machine,
                    line,
                    what="it did not respond",
                    why="the driver hangs, and so will a process that opens the device",
                    remedy="check the end of dmesg (Xid, NVRM, devdrv); reset the device or reboot"
                    " the machine",
                )
            elif broken is not None:
                yield failure(
                    machine,
                    line,
                    what=f"it says: {broken}",
                    why="no process finds a device",
                    remedy="load the driver's kernel module, or reboot after a driver update",
                )


@check(
    "limits",
    "limits on open files, locked memory and processes are high enough (ulimit)",
    needs=lambda examined: any(
        LIMITS_FILE in recording.files or LIMITS_COMMAND in recording.commands
        for recording in examined.ranks
    ),
)
def limits(examined: Examined) -> Iterator[DoctorFinding]:
    """Check the limits of each rank."""
    for recording in examined.ranks:
        yield from _files_and_processes(recording)
        locked = limit(recording, "locked_bytes")
        has_rdma = has_active_port(examined.machine_of(recording))
        if has_rdma and locked is not None and locked < MIN_LOCKED:
            yield failure(
                recording,
                "ulimit -l",
                what=f"a process may lock {locked / GIB:.3g} GiB of memory",
                why="RDMA locks every buffer it sends from; without that NCCL fails with"
                " ibv_reg_mr or falls back to sockets",
                remedy="set memlock to unlimited: in /etc/security/limits.d, as LimitMEMLOCK="
                "infinity of the service, or with docker run --ulimit memlock=-1",
            )


def _files_and_processes(recording: MachineRecording) -> Iterator[DoctorFinding]:
    files, processes = limit(recording, "open_files"), limit(recording, "processes")
    if files is not None and files < MIN_FILES:
        yield failure(
            recording,
            "ulimit -n",
            what=f"a process may open {files:.0f} files",
            why="sockets to other ranks, shards and memory of data workers count as files; a run"
            " fails with 'Too many open files' after hours",
            remedy="run ulimit -n 65536 before the start, or set nofile in /etc/security/limits.d,"
            " or docker run --ulimit nofile=65536",
        )
    if processes is not None and processes < MIN_PROCESSES:
        yield failure(
            recording,
            "ulimit -u",
            what=f"the user may have {processes:.0f} processes and threads",
            why="each rank starts about a hundred threads, and data workers add theirs",
            remedy="run ulimit -u 65536 before the start, or set nproc in /etc/security/limits.d",
        )


@check("shared-memory", "/dev/shm is large enough for workers and collectives")
def shared_memory(examined: Examined) -> Iterator[DoctorFinding]:
    """Check the size of /dev/shm on each machine."""
    for machine in examined.machines:
        size = machine.machine.shared_memory_bytes
        if size is not None and size < MIN_SHARED:
            yield failure(
                machine,
                "/dev/shm",
                what=f"its size is {size / (1 << 20):.0f} MiB",
                why="data workers pass batches through it, and NCCL messages between processes of a"
                " machine; when it is full they end with a bus error",
                remedy="docker run --shm-size=16g or --ipc=host, an emptyDir of medium Memory in"
                " Kubernetes, or mount -o remount,size=16G /dev/shm",
            )


@check("memory", "the control group leaves enough memory to the processes")
def memory(examined: Examined) -> Iterator[DoctorFinding]:
    """Compare each machine's control group limit with its use and with device memory."""
    for machine in examined.machines:
        usage = memory_limit(machine)
        if usage is None:
            continue
        limit_bytes, used = usage
        if used > MAX_USED * limit_bytes:
            yield warning(
                machine,
                "control group",
                what=f"{used / GIB:.1f} GiB of {limit_bytes / GIB:.1f} GiB are in use",
                why="the kernel kills processes beyond the limit without a message (page cache"
                " counts too, but is freed first)",
                remedy="raise the memory of the container or job, or stop other processes in it",
            )
        on_devices = sum(device.memory_bytes for device in machine.machine.accelerators)
        if limit_bytes < MIN_OF_DEVICES * on_devices:
            yield warning(
                machine,
                "control group",
                what=f"its limit is {limit_bytes / GIB:.0f} GiB, with {on_devices / GIB:.0f} GiB of"
                " device memory",
                why="background checkpoints and offloading keep a copy in host memory",
                remedy="raise the memory of the container or job (docker run --memory)",
            )


@check(
    "threads",
    "each computing thread of a process has a core",
    needs=lambda examined: any(threads_of(recording) for recording in examined.ranks),
)
def threads(examined: Examined) -> Iterator[DoctorFinding]:
    """Compare the threads of all ranks of each machine with its cores and load."""
    for machine in examined.machines:
        ranks = [
            recording for recording in examined.ranks if examined.machine_of(recording) is machine
        ]
        # A single thread waits for no other.
        threaded = [recording for recording in ranks if threads_of(recording) > 1]
        if threaded:
            yield from _check_machine(machine, ranks, threaded)


def _check_machine(
    machine: MachineRecording, ranks: list[MachineRecording], threaded: list[MachineRecording]
) -> Iterator[DoctorFinding]:
    cores, total = cores_of(machine, ranks), sum(map(threads_of, ranks))
    busy_elsewhere = busy_cores(machine, cores, len(ranks))
    per_rank = max(1, int(cores / len(ranks)))
    if not cores:  # not recorded
        return
    if total > cores:
        for recording in threaded:
            report = warning if recording.machine.device != "cpu" or sleeps(recording) else failure
            yield report(
                recording,
                "OMP_NUM_THREADS",
                what=f"{_thread_counts(ranks)}, {total} in total, on {cores:g} cores",
                why=TAKE_TURNS if sleeps(recording) else SPINS,
                remedy=f"set OMP_NUM_THREADS={per_rank} before the start: torchrun sets it to 1 if"
                " unset, but srun and python do not",
            )
    elif total + busy_elsewhere > cores + SPARE_CORES:
        free_per_rank = max(1, int((cores - busy_elsewhere) / len(ranks)))
        for recording in (recording for recording in threaded if not sleeps(recording)):
            yield warning(
                recording,
                "OMP_NUM_THREADS",
                what=f"{_thread_counts(ranks)} on {cores:g} cores, {busy_elsewhere:.1f} cores"
                " busy with other processes",
                why=SPINS,
                remedy=f"set OMP_NUM_THREADS={free_per_rank} before the start, or"
                " OMP_WAIT_POLICY=passive, which lets waiting threads sleep; or stop other"
                " processes on the machine",
            )


def _thread_counts(ranks: list[MachineRecording]) -> str:
    """Format the number of threads of the ranks."""
    numbers = sorted({threads_of(recording) for recording in ranks})
    counts = "-".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
    processes = "1 process computes" if len(ranks) == 1 else f"{len(ranks)} processes compute"
    return f"{processes} with {counts} threads" + " each" * (len(ranks) > 1)
