"""Checks of installed software: packages, drivers and collective libraries that fit together."""

from collections.abc import Callable, Iterator
from typing import Final

from ms_profile.doctor.checks import DoctorFinding, check, failure, minority, warning
from ms_profile.doctor.network import has_active_port
from ms_profile.doctor.recording import Examined, MachineRecording
from ms_profile.doctor.vendor_tools import (
    cann,
    gpus,
    has_ascend,
    has_nvidia,
    npu_driver,
    nvidia_driver,
)
from ms_profile.doctor.versions import release, tables, version

BACKENDS: Final = {
    "cuda": ("nccl", "install torch with CUDA, which brings NCCL"),
    "npu": ("hccl", "install torch_npu, and CANN with HCCL"),
    "xpu": ("xccl", "install torch for Intel devices"),
    "cpu": ("gloo", "install torch with distributed support"),
}
"""Collective library of each type of device, and how to install it."""
DEVICE_FILES: Final = "dev/infiniband"
Read = Callable[[MachineRecording], str | None]


@check(
    "packages",
    "torch is built with distributed support; torchrun, and ms-data for ms-parallel, are installed",
    needs=lambda examined: any(recording.machine.packages for recording in examined.ranks),
)
def packages(examined: Examined) -> Iterator[DoctorFinding]:
    """Check each rank, as environments may differ."""
    for recording in examined.ranks:
        machine = recording.machine
        if not machine.packages:
            continue
        if not machine.backends:
            yield failure(
                recording,
                "torch",
                what="torch has no backend for messages between processes",
                why="every layout with more than one process needs one",
                remedy="install a build of torch with distributed support: pip install torch",
            )
        if machine.packages.get("ms-parallel") and machine.packages.get("ms-data") is None:
            yield warning(
                recording,
                "ms-data",
                what="ms-data is not installed",
                why="`ms-parallel train` reads datasets with it",
                remedy="pip install 'ms-parallel[data]'",
            )
        if machine.torchrun is None:
            yield warning(
                recording,
                "torchrun",
                what="torchrun is not on PATH",
                why="it starts the processes of a run",
                remedy="use python -m torch.distributed.run instead, or add its folder to PATH",
            )


@check(
    "collectives",
    "torch has the collective library of its device, with RDMA support",
    needs=lambda examined: any(recording.machine.backends for recording in examined.ranks),
)
def collectives(examined: Examined) -> Iterator[DoctorFinding]:
    """Check each rank's backend, and libibverbs on machines with RDMA ports."""
    for recording in examined.ranks:
        machine = recording.machine
        backend, remedy = BACKENDS.get(machine.device, (None, ""))
        if machine.backends and backend is not None and backend not in machine.backends:
            yield failure(
                recording,
                "torch",
                what=f"torch has no {backend}, which is needed for messages between"
                f" {machine.device} devices",
                why="processes on these devices cannot connect",
                remedy=remedy,
            )
        # None: looked for and not found. Absent: a recording that does not say.
        lacks_verbs = machine.libraries.get("ibverbs", "") is None
        if machine.device == "cuda" and lacks_verbs and _has_port(examined, recording):
            yield failure(
                recording,
                "libibverbs",
                what="there are RDMA ports but libibverbs.so.1 does not load",
                why="NCCL uses TCP sockets instead, at a fraction of the rate",
                remedy="install libibverbs1 and ibverbs-providers, also in the container",
            )
    for recording in examined.machines:
        has_device_file = any(name.startswith("uverbs") for name in recording.names(DEVICE_FILES))
        uses_nccl = recording.machine.packages and recording.machine.device == "cuda"
        if uses_nccl and not has_device_file and _has_port(examined, recording):
            yield failure(
                recording,
                f"/{DEVICE_FILES}",
                what="there are RDMA ports but no device files for them",
                why="NCCL uses TCP sockets instead, at a fraction of the rate",
                remedy="use docker run --device=/dev/infiniband, an RDMA device plugin in"
                " Kubernetes, or modprobe ib_uverbs",
            )


def _has_port(examined: Examined, recording: MachineRecording) -> bool:
    return has_active_port(examined.machine_of(recording))


@check("cuda-driver", "the driver supports torch's CUDA version", needs=has_nvidia)
def cuda_driver(examined: Examined) -> Iterator[DoctorFinding]:
    """Compare each machine's driver with torch on each of its ranks."""
    for recording in examined.ranks:
        machine = examined.machine_of(recording)
        installed = nvidia_driver(machine)
        if installed is None or not recording.machine.packages:
            continue
        if recording.machine.torch_cuda is None:
            yield failure(
                recording,
                "torch",
                what=f"torch {recording.machine.packages.get('torch')} is built without CUDA, but"
                f" there is an NVIDIA driver {installed}",
                why="training runs on the CPU",
                remedy="install torch with CUDA: pip install torch from the index of your CUDA"
                " version, see pytorch.org",
            )
            continue
        yield from _old_driver(recording, installed, recording.machine.torch_cuda)
        if gpus(machine) and not recording.machine.accelerators:
            yield failure(
                recording,
                "torch",
                what=f"nvidia-smi lists devices but torch with CUDA"
                f" {recording.machine.torch_cuda} finds none",
                why="training runs on the CPU",
                remedy="check CUDA_VISIBLE_DEVICES, the device files of a container (--gpus all),"
                " and the error of torch.cuda.init()",
            )


def _old_driver(recording: MachineRecording, installed: str, cuda: str) -> Iterator[DoctorFinding]:
    reference = tables()
    # Minor version compatibility: a driver runs all CUDA versions of its major version.
    minimum = reference.cuda_major_drivers.get(cuda.split(".")[0])
    matching = next((row.driver for row in reference.cuda_drivers if row.cuda == cuda), None)
    if minimum is not None and version(installed) < version(minimum):
        yield failure(
            recording,
            "driver",
            what=f"NVIDIA driver {installed} is older than {minimum}, which torch's CUDA {cuda}"
            " needs",
            why="torch finds no device, or its kernels do not load",
            remedy=f"install driver {matching or minimum} or newer, or torch for an older CUDA",
        )
    elif matching is not None and version(installed) < version(matching):
        yield warning(
            recording,
            "driver",
            what=f"NVIDIA driver {installed} is older than {matching}, released with CUDA {cuda}",
            why="torch runs, but kernels compiled on this machine (torch.compile, Triton) may not"
            " load",
            remedy=f"install driver {matching} or newer",
        )


@check("torch-npu", "torch, torch_npu, CANN and the driver are compatible", needs=has_ascend)
def torch_npu(examined: Examined) -> Iterator[DoctorFinding]:
    """Compare each rank's packages with its machine."""
    for recording in examined.ranks:
        machine = examined.machine_of(recording)
        if npu_driver(machine) is None:
            continue
        if recording.machine.packages:
            yield from _torch_npu_versions(recording, cann(machine))
        yield from _ascend_driver(recording, machine)


def _torch_npu_versions(
    recording: MachineRecording, toolkit: str | None
) -> Iterator[DoctorFinding]:
    torch, extension = (recording.machine.packages.get(name) for name in ("torch", "torch-npu"))
    if extension is None:
        yield failure(
            recording,
            "torch_npu",
            what="there are Ascend devices but torch_npu is not installed",
            why="torch does not find them, and training runs on the CPU",
            remedy=f"pip install torch-npu=={release(torch or '') or 'the version of torch'}",
        )
        return
    if torch is not None and release(torch) != release(extension):
        yield failure(
            recording,
            "torch_npu",
            what=f"torch_npu {extension} is for torch {release(extension)}, but torch is {torch}",
            why="it does not load, or its operators misbehave",
            remedy=f"pip install torch=={release(extension)}, or a torch_npu for {release(torch)}",
        )
        return
    base = extension.split("+")[0]
    # The newest known release up to the installed one, for the same version of torch.
    rows = [row for row in tables().torch_npu if version(row.torch_npu) <= version(base)]
    rows = [row for row in rows if row.torch == release(base)]
    row = max(rows, key=lambda row: version(row.torch_npu), default=None)
    if row is None or toolkit is None:
        return
    if version(toolkit)[:2] != version(row.cann)[:2]:
        yield warning(
            recording,
            "CANN",
            what=f"CANN is {toolkit}, but torch_npu {extension} was released with {row.cann}",
            why="operators may be missing or slow; only adjacent releases are tested together",
            remedy=f"install CANN {row.cann}, or the torch_npu released with {toolkit}",
        )


def _ascend_driver(
    recording: MachineRecording, machine: MachineRecording
) -> Iterator[DoctorFinding]:
    installed, toolkit = npu_driver(machine), cann(machine)
    if toolkit is None:
        yield failure(
            recording,
            "CANN",
            what="CANN is not found in /usr/local/Ascend/ascend-toolkit/latest",
            why="torch_npu loads its operators and HCCL from there",
            remedy="install the CANN toolkit and kernels, or point ASCEND_HOME_PATH to them",
        )
        return
    # A newer CANN than the table knows needs at least the driver of the newest entry before it.
    rows = [row for row in tables().ascend_drivers if version(row.cann) <= version(toolkit)]
    row = max(rows, key=lambda row: version(row.cann), default=None)
    if row is not None and installed is not None and version(installed) < version(row.driver):
        yield failure(
            recording,
            "driver",
            what=f"Ascend driver {installed} is older than {row.driver}, the oldest for CANN"
            f" {toolkit}",
            why="devices do not open, or operators fail at run time",
            remedy=f"install Ascend HDK {row.driver} or newer, driver and firmware, and restart",
        )


@check(
    "same-versions",
    "all ranks run the same versions",
    needs=lambda examined: len(examined.ranks) > 1,
)
def same_versions(examined: Examined) -> Iterator[DoctorFinding]:
    """Report ranks that differ from the majority; builds are compared per type of device."""
    ranks = [recording for recording in examined.ranks if recording.machine.packages]
    yield from _differing("ms-parallel", _package("ms-parallel"), ranks)
    # Different versions of these work together, but not bit for bit.
    yield from _differing("Python", lambda rank: rank.machine.python or None, ranks, warning)
    yield from _differing("triton", _package("triton"), ranks, warning)
    yield from _differing("ms-data", _package("ms-data"), ranks, warning)
    device_types = sorted({recording.machine.device for recording in ranks})
    if len(device_types) > 1:
        yield from _differing("torch", _torch_release, ranks)
    for device_type in device_types:
        same_type = [recording for recording in ranks if recording.machine.device == device_type]
        yield from _differing("torch", _package("torch"), same_type)
        yield from _differing("torch_npu", _package("torch-npu"), same_type)
        yield from _differing("CUDA of torch", lambda rank: rank.machine.torch_cuda, same_type)
        yield from _differing("NCCL", lambda rank: rank.machine.libraries.get("nccl"), same_type)
        machines = [node for node in examined.machines if node.machine.device == device_type]
        yield from _differing("NVIDIA driver", nvidia_driver, machines)
        yield from _differing("Ascend driver", npu_driver, machines)
        yield from _differing("CANN", cann, machines)


def _package(name: str) -> Read:
    return lambda recording: recording.machine.packages.get(name)


def _torch_release(recording: MachineRecording) -> str | None:
    return release(recording.machine.packages.get("torch") or "") or None


def _differing(
    name: str,
    read: Read,
    recordings: list[MachineRecording],
    report: Callable[..., DoctorFinding] = failure,
) -> Iterator[DoctorFinding]:
    versions = [read(recording) for recording in recordings]
    for recording, installed, majority in minority(recordings, versions):
        yield report(
            recording,
            name,
            what=f"{name} is {installed or 'absent'} here and {majority or 'absent'} on most"
            " other ranks",
            why="ranks with different versions may wait in different collectives, or compute"
            " different results",
            remedy=f"install {name} {majority} here"
            if majority
            else f"remove {name} here, or install it on all",
        )
