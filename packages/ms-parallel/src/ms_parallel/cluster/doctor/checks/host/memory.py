"""Check shared memory and the memory limit of the control group."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.limits import memory_limit
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check

GIB = 1 << 30
MIN_SHARED = GIB
MAX_USED = 0.9
MIN_OF_DEVICES = 0.5


@check("shared-memory", "/dev/shm is large enough for workers and collectives")
def shared_memory(examined: Examined) -> Iterator[Finding]:
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
def memory(examined: Examined) -> Iterator[Finding]:
    """Compare each machine's control group limit with its use and with device memory."""
    for machine in examined.machines:
        usage = memory_limit(machine)
        if usage is None:
            continue
        limit, used = usage
        if used > MAX_USED * limit:
            yield warning(
                machine,
                "control group",
                what=f"{used / GIB:.1f} GiB of {limit / GIB:.1f} GiB are in use",
                why="the kernel kills processes beyond the limit without a message (page cache"
                " counts too, but is freed first)",
                remedy="raise the memory of the container or job, or stop other processes in it",
            )
        on_devices = sum(device.memory_bytes for device in machine.machine.accelerators)
        if limit < MIN_OF_DEVICES * on_devices:
            yield warning(
                machine,
                "control group",
                what=f"its limit is {limit / GIB:.0f} GiB, with {on_devices / GIB:.0f} GiB of"
                " device memory",
                why="background checkpoints and offloading keep a copy in host memory",
                remedy="raise the memory of the container or job (docker run --memory)",
            )
