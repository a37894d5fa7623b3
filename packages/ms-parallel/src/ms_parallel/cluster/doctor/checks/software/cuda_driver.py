"""Check that NVIDIA's driver is new enough for torch's CUDA version."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.nvidia import driver, gpus, has_nvidia
from ms_parallel.cluster.doctor.readings.tables import tables
from ms_parallel.cluster.doctor.readings.version import version
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check


@check("cuda-driver", "the driver supports torch's CUDA version", needs=has_nvidia)
def cuda_driver(examined: Examined) -> Iterator[Finding]:
    """Compare each machine's driver with torch on each of its ranks."""
    for recording in examined.ranks:
        installed = driver(examined.machine_of(recording.machine.rank))
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
        yield from _too_old(recording, installed, recording.machine.torch_cuda)
        if gpus(examined.machine_of(recording.machine.rank)) and not recording.machine.accelerators:
            yield failure(
                recording,
                "torch",
                what=f"nvidia-smi lists devices but torch with CUDA"
                f" {recording.machine.torch_cuda} finds none",
                why="training runs on the CPU",
                remedy="check CUDA_VISIBLE_DEVICES, the device files of a container (--gpus all),"
                " and the error of torch.cuda.init()",
            )


def _too_old(recording: Recording, installed: str, cuda: str) -> Iterator[Finding]:
    reference = tables()
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
