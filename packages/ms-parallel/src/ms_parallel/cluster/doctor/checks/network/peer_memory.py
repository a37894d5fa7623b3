"""Check that adapters can access NVIDIA device memory directly."""

import re
from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.readings.nvidia import DRIVER_FILE, gpus, has_nvidia
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, has_rdma, ports
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check

MODULES = re.compile(r"^(nvidia_peermem|nv_peer_mem)\s", re.MULTILINE)
OPEN = "Open Kernel Module"


@check(
    "peer-memory",
    "adapters access device memory directly (GPUDirect RDMA)",
    needs=lambda examined: has_rdma(examined) and has_nvidia(examined),
)
def peer_memory(examined: Examined) -> Iterator[Finding]:
    """Check for the kernel module on machines with devices and ports."""
    for machine in examined.machines:
        modules = machine.text("proc/modules")
        has_rdma_port = any(port.state == ACTIVE for port in ports(machine))
        if (
            modules is None
            or not has_rdma_port
            or not gpus(machine)
            or MODULES.search(f"{modules}\n")
        ):
            continue
        if OPEN in (machine.text(DRIVER_FILE) or ""):
            continue  # shares device memory by DMA-BUF
        yield failure(
            machine,
            "kernel modules",
            what="neither nvidia_peermem nor nv_peer_mem is loaded",
            why="the closed driver shares device memory in no other way: every message is copied"
            " through host memory, at a fraction of the rate",
            remedy="modprobe nvidia_peermem and list it in /etc/modules-load.d, or install the"
            " driver's open kernel module, which needs neither",
        )
