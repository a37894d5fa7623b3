"""Whether there is memory to share between processes, and memory at all."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.limits import memory_limit
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check

GIB = 1 << 30
LEAST_SHARED = GIB
MOST_TAKEN = 0.9
LEAST_OF_DEVICES = 0.5


@check("shared-memory", "/dev/shm is large enough for workers and collectives")
def shared_memory(examined: Examined) -> Iterator[Finding]:
    """Look at its size on each machine."""
    for machine in examined.machines:
        size = machine.machine.shared_memory_bytes
        if size is not None and size < LEAST_SHARED:
            yield failure(
                machine,
                "/dev/shm",
                what=f"it holds {size / (1 << 20):.0f} MiB",
                why="data workers pass batches through it, and NCCL messages between processes of a"
                " machine; where it is full they end with a bus error",
                remedy="docker run --shm-size=16g or --ipc=host, an emptyDir of medium Memory in"
                " Kubernetes, or mount -o remount,size=16G /dev/shm",
            )


@check("memory", "the control group leaves the processes memory")
def memory(examined: Examined) -> Iterator[Finding]:
    """Look at the limit of each machine's control group beside what it has and holds."""
    for machine in examined.machines:
        found = memory_limit(machine)
        if found is None:
            continue
        most, taken = found
        if taken > MOST_TAKEN * most:
            yield warning(
                machine,
                "control group",
                what=f"{taken / GIB:.1f} GiB of {most / GIB:.1f} GiB are taken",
                why="what goes beyond is ended by the kernel without a word; pages of files count"
                " too, and are given back first",
                remedy="raise the memory of the container or job, or end what else runs in it",
            )
        on_devices = sum(one.memory_bytes for one in machine.machine.accelerators)
        if most < LEAST_OF_DEVICES * on_devices:
            yield warning(
                machine,
                "control group",
                what=f"it gives {most / GIB:.0f} GiB beside {on_devices / GIB:.0f} GiB of devices",
                why="a checkpoint in the background, and offloading, hold a copy in host memory",
                remedy="raise the memory of the container or job (docker run --memory)",
            )
