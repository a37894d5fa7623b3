"""Check that the MTU is the same throughout a network, and large enough for RDMA."""

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

MIN_ROCE_MTU = 4200
"""Minimum Ethernet MTU for RoCE's largest packets of 4,096 bytes plus headers."""
VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "ifb", "tun", "bond-")
SOCKETS = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@frozen(kw_only=True)
class _PortMtu:
    recording: Recording
    network: str
    where: str
    mtu: int
    minimum: int
    """MTU that suffices."""
    remedy: str
    """Command that sets the MTU, without the number."""


@check("packet-size", "the MTU is the same on all ports of a network")
def packet_size(examined: Examined) -> Iterator[Finding]:
    """Compare the ports of each network over all machines."""
    port_mtus = [
        port_mtu for machine in examined.machines for port_mtu in _port_mtus(examined, machine)
    ]
    for network in sorted({port_mtu.network for port_mtu in port_mtus}):
        members = [port_mtu for port_mtu in port_mtus if port_mtu.network == network]
        majority = Counter(port_mtu.mtu for port_mtu in members).most_common(1)[0][0]
        for port_mtu in members:
            if port_mtu.mtu != majority:
                yield failure(
                    port_mtu.recording,
                    port_mtu.where,
                    what=f"its MTU is {port_mtu.mtu} bytes, and {majority} on other ports of"
                    f" {network}",
                    why="larger packets are dropped on the way: small messages arrive and large"
                    " ones hang",
                    remedy=f"set the same on all ports and switches: {port_mtu.remedy} {majority}",
                )
        for port_mtu in members:
            if port_mtu.mtu == majority < port_mtu.minimum:
                yield warning(
                    port_mtu.recording,
                    port_mtu.where,
                    what=f"its MTU is {port_mtu.mtu} bytes, below the {port_mtu.minimum} of RDMA's"
                    " largest packets",
                    why="messages go in more packets, with more headers and less bandwidth",
                    remedy=f"raise it on all ports and switches: {port_mtu.remedy}"
                    f" {max(port_mtu.minimum, 9000) if network == 'RoCE' else port_mtu.minimum}",
                )


def _port_mtus(examined: Examined, machine: Recording) -> Iterator[_PortMtu]:
    over_rdma, rdma_mtus = set(), packet_bytes(machine)
    for port in chosen_ports(machine, value(examined, machine, "NCCL_IB_HCA")):
        for name in port.interfaces:
            link = interface(machine, name)
            over_rdma.add(name)
            if port.is_ethernet and port.state == ACTIVE and link and link.mtu:
                yield _interface_mtu(machine, "RoCE", name, link.mtu)
        if not port.is_ethernet and port.state == ACTIVE and port.name in rdma_mtus:
            active, largest = rdma_mtus[port.name]
            yield _PortMtu(
                recording=machine,
                network="InfiniBand",
                where=f"{port.adapter} port {port.number}",
                mtu=active,
                minimum=largest,
                remedy="in the subnet manager's partitions.conf, mtu of",
            )
    for npu in npu_ports(machine):
        if npu.mtu is not None:
            yield _PortMtu(
                recording=machine,
                network="the NPUs",
                where=f"NPU {npu.number}",
                mtu=npu.mtu,
                minimum=0,
                remedy=f"hccn_tool -i {npu.number} -mtu -s size",
            )
    for name in _sockets(examined, machine):
        link = interface(machine, name)
        if name not in over_rdma and link and link.up and link.mtu:
            yield _interface_mtu(machine, "TCP", name, link.mtu)


def _interface_mtu(machine: Recording, network: str, name: str, mtu: int) -> _PortMtu:
    remedy = f"ip link set dev {name} mtu"
    minimum = MIN_ROCE_MTU if network == "RoCE" else 0
    return _PortMtu(
        recording=machine, network=network, where=name, mtu=mtu, minimum=minimum, remedy=remedy
    )


def _sockets(examined: Examined, machine: Recording) -> list[str]:
    """Interface for sockets: the configured one, or the first physical one that is up."""
    for variable in SOCKETS:
        choice = value(examined, machine, variable)
        if choice:
            return named_interfaces(machine, choice)[:1]
    names = [
        link.name for link in interfaces(machine) if link.up and not link.name.startswith(VIRTUAL)
    ]
    names = [name for name in names if not name.startswith("ib")]
    return names[:1]
