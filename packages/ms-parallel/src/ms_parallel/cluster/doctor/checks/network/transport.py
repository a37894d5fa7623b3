"""Check that the collective library uses RDMA where there are RDMA ports."""

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
    "NCCL reports that it uses RDMA",
    needs=lambda examined: bool(examined.measured.log) and has_rdma(examined),
)
def transport(examined: Examined) -> Iterator[Finding]:
    """Search NCCL's log of its initialization."""
    log = examined.measured.log
    if RDMA.search(log) or not SOCKETS.search(log):
        return
    for machine in examined.machines:
        if any(port.state == ACTIVE for port in ports(machine)):
            yield failure(
                machine,
                "NCCL",
                what="its log says that it uses sockets, although RDMA ports are up",
                why="messages between machines have a fraction of the rate",
                remedy="check NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA, libibverbs and"
                " /dev/infiniband in the container, and run with NCCL_DEBUG=INFO",
            )
