"""Whether the libraries that carry messages between devices are there."""

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
    "torch has the collective library of its device, which finds RDMA's",
    needs=lambda examined: any(one.machine.backends for one in examined.ranks),
)
def collectives(examined: Examined) -> Iterator[Finding]:
    """Look at each rank: its backend, and libibverbs where there is RDMA."""
    for one in examined.ranks:
        machine = one.machine
        backend = NEEDED.get(machine.device)
        if machine.backends and backend is not None and backend not in machine.backends:
            yield failure(
                one,
                "torch",
                what=f"torch has no {backend}, which carries messages between {machine.device}"
                " devices",
                why="processes on these devices cannot meet",
                remedy=INSTALL[backend],
            )
        reaches = any(port.state == "active" for port in ports(examined.machine_of(machine.rank)))
        if machine.device == "cuda" and reaches and machine.libraries.get("ibverbs", "") is None:
            yield failure(
                one,
                "libibverbs",
                what="there are RDMA ports and libibverbs.so.1 does not load",
                why="NCCL sends over TCP sockets instead, at a fraction of the rate",
                remedy="install libibverbs1 and ibverbs-providers, in the container too",
            )
    for at in examined.machines:
        reaches = any(port.state == "active" for port in ports(at))
        seen = any(name.startswith("uverbs") for name in at.names(DEVICE_FILES))
        if at.machine.packages and at.machine.device == "cuda" and reaches and not seen:
            yield failure(
                at,
                f"/{DEVICE_FILES}",
                what="there are RDMA ports and no device file of them",
                why="NCCL sends over TCP sockets instead, at a fraction of the rate",
                remedy="docker run --device=/dev/infiniband, an RDMA device plugin in Kubernetes,"
                " or modprobe ib_uverbs",
            )
