"""Whether NVIDIA's driver is new enough for the CUDA that torch was built for."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.nvidia import driver, gpus, has_nvidia
from ms_parallel.cluster.doctor.readings.tables import tables
from ms_parallel.cluster.doctor.readings.version import version
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check


@check("cuda-driver", "the driver runs the CUDA that torch was built for", needs=has_nvidia)
def cuda_driver(examined: Examined) -> Iterator[Finding]:
    """Look at the driver of each machine beside torch of each of its ranks."""
    for one in examined.ranks:
        found = driver(examined.machine_of(one.machine.rank))
        if found is None or not one.machine.packages:
            continue
        if one.machine.torch_cuda is None:
            yield failure(
                one,
                "torch",
                what=f"torch {one.machine.packages.get('torch')} is built without CUDA, and there"
                f" is an NVIDIA driver {found}",
                why="training takes the CPU",
                remedy="install torch with CUDA: pip install torch from the index of your CUDA"
                " version, as pytorch.org names it",
            )
            continue
        yield from _too_old(one, found, one.machine.torch_cuda)
        if gpus(examined.machine_of(one.machine.rank)) and not one.machine.accelerators:
            yield failure(
                one,
                "torch",
                what=f"nvidia-smi lists devices and torch with CUDA {one.machine.torch_cuda} finds"
                " none",
                why="training takes the CPU",
                remedy="look at CUDA_VISIBLE_DEVICES, at the device files of a container"
                " (--gpus all), and at what torch.cuda.init() raises",
            )


def _too_old(one: Recording, found: str, cuda: str) -> Iterator[Finding]:
    known = tables()
    least = known.cuda_major_drivers.get(cuda.split(".")[0])
    own = next((row.driver for row in known.cuda_drivers if row.cuda == cuda), None)
    if least is not None and version(found) < version(least):
        yield failure(
            one,
            "driver",
            what=f"NVIDIA driver {found} is older than {least}, which CUDA {cuda} of torch needs",
            why="torch finds no device, or its kernels do not load",
            remedy=f"install driver {own or least} or newer, or a torch built for an older CUDA",
        )
    elif own is not None and version(found) < version(own):
        yield warning(
            one,
            "driver",
            what=f"NVIDIA driver {found} is older than {own}, which came with CUDA {cuda}",
            why="torch runs, but kernels that are compiled here (torch.compile, Triton) may not"
            " load",
            remedy=f"install driver {own} or newer",
        )
