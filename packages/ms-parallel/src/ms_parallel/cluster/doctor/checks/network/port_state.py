"""Check that the ports of a run are up."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.readings.ascend import has_npu_ports, npu_ports
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, Port, chosen_ports, has_rdma
from ms_parallel.cluster.doctor.readings.variables import value
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check


@check(
    "port-state",
    "every RDMA port is up",
    needs=lambda examined: has_rdma(examined) or has_npu_ports(examined),
)
def port_state(examined: Examined) -> Iterator[Finding]:
    """Check the ports selected by NCCL_IB_HCA, and the ports of NPUs."""
    for machine in examined.machines:
        choice = value(examined, machine, "NCCL_IB_HCA")
        chosen = chosen_ports(machine, choice)
        if choice and not chosen and has_rdma(examined):
            yield failure(
                machine,
                "NCCL_IB_HCA",
                what=f"NCCL_IB_HCA={choice} matches no port of this machine",
                why="NCCL uses TCP sockets instead, at a fraction of the rate",
                remedy="use adapter names from ibstat, or unset it",
            )
        for port in chosen:
            if port.state != ACTIVE:
                yield failure(
                    machine,
                    f"{port.adapter} port {port.number}",
                    what=f"the port is {port.state or 'in an unknown state'}"
                    f" (physically {port.physical or 'unknown'})",
                    why="its bandwidth is missing, and ranks bound to it hang or fail",
                    remedy=_remedy(port)
                    + "; exclude ports that are not for training with NCCL_IB_HCA",
                )
        yield from _npus(machine)


def _remedy(port: Port) -> str:
    if port.state in ("init", "armed") and not port.is_ethernet:
        return "start the subnet manager of the fabric (opensm, or that of the switch)"
    if port.physical == "linkup" and port.is_ethernet:
        return "bring the interface up: ip link set dev NAME up"
    if port.physical == "disabled":
        return "enable the port: ibportstate LID PORT enable, or mlxlink --port_state UP"
    return "check the cable, the transceiver and the switch port"


def _npus(machine: Recording) -> Iterator[Finding]:
    for port in npu_ports(machine):
        where = f"NPU {port.number}"
        if port.link not in ("up", ""):
            yield failure(
                machine,
                where,
                what=f"the link of its RoCE port is {port.link}",
                why="HCCL cannot reach other machines from this device, and the run fails or hangs",
                remedy="check the cable, the optical module (hccn_tool -i"
                f" {port.number} -optical -g) and the switch port",
            )
        elif "fault" in port.health or "timeout" in port.health or "unreach" in port.health:
            yield failure(
                machine,
                where,
                what=f"its network health is {port.health!r}",
                why="packets to the monitored address do not come back",
                remedy=f"check address, gateway and route: hccn_tool -i {port.number} -ip -g,"
                " -gateway -g, -netdetect -g",
            )
