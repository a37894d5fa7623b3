"""Whether the collective library says that it sends over the ports that are there."""

import re
from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, has_rdma, ports
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check

SOCKETS = re.compile(r"Using network Socket|NET/Socket : Using")
RDMA = re.compile(r"Using network IB|NET/IB : Using|via NET/IB")


@check(
    "transport",
    "NCCL says that it sends over RDMA",
    needs=lambda examined: bool(examined.measured.log) and has_rdma(examined),
)
def transport(examined: Examined) -> Iterator[Finding]:
    """Read what NCCL has said while it started."""
    log = examined.measured.log
    if RDMA.search(log) or not SOCKETS.search(log):
        return
    for machine in examined.machines:
        if any(port.state == ACTIVE for port in ports(machine)):
            yield failure(
                machine,
                "NCCL",
                what="its log says that it sends over sockets, and RDMA ports are up",
                why="messages between machines go at a fraction of the rate",
                remedy="look for NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA, for libibverbs and"
                " /dev/infiniband in the container, and run with NCCL_DEBUG=INFO",
            )
