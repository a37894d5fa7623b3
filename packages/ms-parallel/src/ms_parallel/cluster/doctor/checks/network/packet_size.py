"""Whether the largest packets are the same along all of a network, and large enough for RDMA."""

from collections import Counter
from collections.abc import Iterator

from attrs import frozen

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import npu_ports
from ms_parallel.cluster.doctor.readings.interfaces import interface, interfaces, named_interfaces
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, chosen_ports, packet_bytes
from ms_parallel.cluster.doctor.readings.variables import value
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

LEAST_OF_ROCE = 4200
"""Bytes that an Ethernet packet must hold for RoCE to send its largest, 4,096 bytes and headers."""
VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "ifb", "tun", "bond-")
SOCKETS = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@frozen(kw_only=True)
class _Sized:
    at: Recording
    network: str
    where: str
    mtu: int
    least: int
    """What is not below is large enough."""
    remedy: str
    """The command that sets it, without the number."""


@check("packet-size", "the MTU is the same on all ports of a network")
def packet_size(examined: Examined) -> Iterator[Finding]:
    """Compare the ports of each network over all machines."""
    sized = [one for machine in examined.machines for one in _sized(examined, machine)]
    for network in sorted({one.network for one in sized}):
        members = [one for one in sized if one.network == network]
        most = Counter(one.mtu for one in members).most_common(1)[0][0]
        for one in members:
            if one.mtu != most:
                yield failure(
                    one.at,
                    one.where,
                    what=f"its MTU is {one.mtu} bytes, and {most} on other ports of {network}",
                    why="larger packets are dropped on the way: small messages arrive and large"
                    " ones hang",
                    remedy=f"set the same on all, and on the switch: {one.remedy} {most}",
                )
        for one in members:
            if one.mtu == most < one.least:
                yield warning(
                    one.at,
                    one.where,
                    what=f"its MTU is {one.mtu} bytes, below the {one.least} of RDMA's largest"
                    " packets",
                    why="messages go in more packets, with more headers and less bandwidth",
                    remedy=f"raise it on all ports and switches: {one.remedy}"
                    f" {max(one.least, 9000) if network == 'RoCE' else one.least}",
                )


def _sized(examined: Examined, machine: Recording) -> Iterator[_Sized]:
    over_rdma, printed = set(), packet_bytes(machine)
    for port in chosen_ports(machine, value(examined, machine, "NCCL_IB_HCA")):
        for name in port.interfaces:
            found = interface(machine, name)
            over_rdma.add(name)
            if port.is_ethernet and port.state == ACTIVE and found and found.mtu:
                yield _of_interface(machine, "RoCE", name, found.mtu)
        if not port.is_ethernet and port.state == ACTIVE and port.name in printed:
            active, largest = printed[port.name]
            yield _Sized(
                at=machine,
                network="InfiniBand",
                where=f"{port.adapter} port {port.number}",
                mtu=active,
                least=largest,
                remedy="in the subnet manager's partitions.conf, mtu of",
            )
    for npu in npu_ports(machine):
        if npu.mtu is not None:
            yield _Sized(
                at=machine,
                network="the NPUs",
                where=f"NPU {npu.number}",
                mtu=npu.mtu,
                least=0,
                remedy=f"hccn_tool -i {npu.number} -mtu -s size",
            )
    for name in _sockets(examined, machine):
        found = interface(machine, name)
        if name not in over_rdma and found and found.up and found.mtu:
            yield _of_interface(machine, "TCP", name, found.mtu)


def _of_interface(machine: Recording, network: str, name: str, mtu: int) -> _Sized:
    remedy = f"ip link set dev {name} mtu"
    least = LEAST_OF_ROCE if network == "RoCE" else 0
    return _Sized(at=machine, network=network, where=name, mtu=mtu, least=least, remedy=remedy)


def _sockets(examined: Examined, machine: Recording) -> list[str]:
    """Find the interface that sockets go over: the chosen one, or the first that is up."""
    for variable in SOCKETS:
        choice = value(examined, machine, variable)
        if choice:
            return named_interfaces(machine, choice)[:1]
    usual = [one.name for one in interfaces(machine) if one.up and not one.name.startswith(VIRTUAL)]
    usual = [name for name in usual if not name.startswith("ib")]
    return usual[:1]
