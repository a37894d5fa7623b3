"""Check that the collective libraries of the devices are installed."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.readings.ports import ports
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check

NEEDED = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl", "cpu": "gloo"}
INSTALL = {
    "nccl": "install torch with CUDA, which brings NCCL",
    "hccl": "install torch_npu, and CANN with HCCL",
    "xccl": "install torch for Intel devices",
    "gloo": "install torch with distributed support",
}
DEVICE_FILES = "dev/infiniband"


@check(
    "collectives",
    "torch has the collective library of its device, with RDMA support",
    needs=lambda examined: any(one.machine.backends for one in examined.ranks),
)
def collectives(examined: Examined) -> Iterator[Finding]:
    """Check each rank's backend, and libibverbs on machines with RDMA ports."""
    for recording in examined.ranks:
        machine = recording.machine
        backend = NEEDED.get(machine.device)
        if machine.backends and backend is not None and backend not in machine.backends:
            yield failure(
                recording,
                "torch",
                what=f"torch has no {backend}, which is needed for messages between"
                f" {machine.device} devices",
                why="processes on these devices cannot connect",
                remedy=INSTALL[backend],
            )
        has_rdma_port = any(
            port.state == "active" for port in ports(examined.machine_of(machine.rank))
        )
        if (
            machine.device == "cuda"
            and has_rdma_port
            and machine.libraries.get("ibverbs", "") is None
        ):
            yield failure(
                recording,
                "libibverbs",
                what="there are RDMA ports but libibverbs.so.1 does not load",
                why="NCCL uses TCP sockets instead, at a fraction of the rate",
                remedy="install libibverbs1 and ibverbs-providers, also in the container",
            )
    for recording in examined.machines:
        has_rdma_port = any(port.state == "active" for port in ports(recording))
        has_device_file = any(name.startswith("uverbs") for name in recording.names(DEVICE_FILES))
        if (
            recording.machine.packages
            and recording.machine.device == "cuda"
            and has_rdma_port
            and not has_device_file
        ):
            yield failure(
                recording,
                f"/{DEVICE_FILES}",
                what="there are RDMA ports but no device files for them",
                why="NCCL uses TCP sockets instead, at a fraction of the rate",
                remedy="use docker run --device=/dev/infiniband, an RDMA device plugin in"
                " Kubernetes, or modprobe ib_uverbs",
            )
