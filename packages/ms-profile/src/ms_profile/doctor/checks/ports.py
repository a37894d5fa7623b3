"""Checks of network ports: state, rate, MTU, and direct access to device memory."""

import re
from collections.abc import Iterator
from typing import Final

from attrs import frozen

from ms_profile.doctor.checks import DoctorFinding, check, failure, minority, warning
from ms_profile.doctor.network import (
    INTERFACES,
    RDMA,
    Port,
    chosen_interfaces,
    chosen_ports,
    has_active_port,
    has_rdma,
    interface,
    rdma_mtus,
    value,
)
from ms_profile.doctor.recording import Examined, MachineRecording
from ms_profile.doctor.vendor_tools import (
    DRIVER_FILE,
    gpus,
    has_npu_ports,
    has_nvidia,
    npu_ports,
)
from ms_profile.doctor.versions import tables

NUMBER: Final = re.compile(r"\d{1,6}(\.\d{1,3})?")
MIN_ROCE_MTU: Final = 4200
"""Minimum Ethernet MTU for RoCE's largest packets of 4,096 bytes plus headers."""
NOT_PHYSICAL: Final = (
    "lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "ifb", "tun", "bond-", "ib",
)  # fmt: skip
"""Prefixes of the names of virtual and InfiniBand interfaces."""
SOCKET_VARIABLES: Final = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
PEER_MODULES: Final = re.compile(r"^(nvidia_peermem|nv_peer_mem)\s", re.MULTILINE)
OPEN_DRIVER: Final = "Open Kernel Module"


def _needs_ports(examined: Examined) -> bool:
    return has_rdma(examined) or has_npu_ports(examined)


def _training_ports(examined: Examined, machine: MachineRecording) -> list[Port]:
    return chosen_ports(machine, value(examined, machine, "NCCL_IB_HCA"))


@check("port-state", "every RDMA port is up", needs=_needs_ports)
def port_state(examined: Examined) -> Iterator[DoctorFinding]:
    """Check the ports selected by NCCL_IB_HCA, and the ports of NPUs."""
    for machine in examined.machines:
        choice = value(examined, machine, "NCCL_IB_HCA")
        selected = chosen_ports(machine, choice)
        if choice and not selected and has_rdma(examined):
            yield failure(
                machine,
                "NCCL_IB_HCA",
                what=f"NCCL_IB_HCA={choice} matches no port of this machine",
                why="NCCL uses TCP sockets instead, at a fraction of the rate",
                remedy="use adapter names from ibstat, or unset it",
            )
        for port in (port for port in selected if not port.is_active):
            yield failure(
                machine,
                port.name,
                what=f"the port is {port.state or 'in an unknown state'}"
                f" (physically {port.physical or 'unknown'})",
                why="its bandwidth is missing, and ranks bound to it hang or fail",
                remedy=f"{_port_remedy(port)}; exclude ports that are not for training with"
                " NCCL_IB_HCA",
            )
        yield from _npu_port_states(machine)


def _port_remedy(port: Port) -> str:
    # The cable is connected, but no subnet manager has given the port its address.
    if port.state in ("init", "armed") and not port.is_ethernet:
        return "start the subnet manager of the fabric (opensm, or the switch's)"
    if port.physical == "linkup" and port.is_ethernet:
        return "bring the interface up: ip link set dev NAME up"
    if port.physical == "disabled":
        return "enable the port: ibportstate LID PORT enable, or mlxlink --port_state UP"
    return "check the cable, the transceiver and the switch port"


def _npu_port_states(machine: MachineRecording) -> Iterator[DoctorFinding]:
    for port in npu_ports(machine):
        if port.link not in ("up", ""):
            yield failure(
                machine,
                port.name,
                what=f"the link of its RoCE port is {port.link}",
                why="HCCL cannot reach other machines from this device, and the run fails or hangs",
                remedy="check the cable, the optical module (hccn_tool -i"
                f" {port.number} -optical -g) and the switch port",
            )
        elif any(word in port.health for word in ("fault", "timeout", "unreach")):
            yield failure(
                machine,
                port.name,
                what=f"its network health is {port.health!r}",
                why="packets to the monitored address do not come back",
                remedy=f"check address, gateway and route: hccn_tool -i {port.number} -ip -g,"
                " -gateway -g, -netdetect -g",
            )


@frozen
class _PortRate:
    machine: MachineRecording
    port: str
    adapter_type: str
    gbit_per_s: float


@check("port-rate", "every RDMA port runs at the full rate of its type", needs=_needs_ports)
def port_rate(examined: Examined) -> Iterator[DoctorFinding]:
    """Compare ports with others of their type and with its maximum, and adapters with slots."""
    rates = [rate for machine in examined.machines for rate in _port_rates(examined, machine)]
    fastest: dict[str, float] = {}
    for rate in rates:
        fastest[rate.adapter_type] = max(fastest.get(rate.adapter_type, 0.0), rate.gbit_per_s)
    for rate in rates:
        maximum = tables().adapters_gbit_per_s.get(rate.adapter_type, 0.0)
        if rate.gbit_per_s < fastest[rate.adapter_type]:
            yield failure(
                rate.machine,
                rate.port,
                what=f"the port runs at {rate.gbit_per_s:g} Gb/s, and others of its type"
                f" ({rate.adapter_type or 'unknown'}) at {fastest[rate.adapter_type]:g} Gb/s",
                why="collectives run at the rate of the slowest port",
                remedy="check the cable and the configured rate of the switch port; reset the link"
                " afterwards",
            )
        elif rate.gbit_per_s < maximum:
            yield warning(
                rate.machine,
                rate.port,
                what=f"the port runs at {rate.gbit_per_s:g} Gb/s, and adapters of its type"
                f" ({rate.adapter_type}) support {maximum:g} Gb/s",
                why="collectives between machines take longer than necessary",
                remedy="check the cable and the switch; nothing needs to be done if the switch, or"
                " this model of the adapter, supports no more",
            )
    for machine in examined.machines:
        yield from _slots(examined, machine)


def _port_rates(examined: Examined, machine: MachineRecording) -> Iterator[_PortRate]:
    for port in _training_ports(examined, machine):
        if port.is_active and port.rate_gbit_per_s is not None:
            yield _PortRate(machine, port.name, port.adapter_type, port.rate_gbit_per_s)
    for npu in npu_ports(machine):
        if npu.link == "up" and npu.rate_gbit_per_s is not None:
            yield _PortRate(machine, npu.name, "NPU", npu.rate_gbit_per_s)


def _slots(examined: Examined, machine: MachineRecording) -> Iterator[DoctorFinding]:
    """Find adapters in slots with too few lanes or of an old generation."""
    for adapter in sorted({port.adapter for port in _training_ports(examined, machine)}):
        for attribute, template in (("link_speed", "at {}"), ("link_width", "with {} lanes")):
            current, maximum = (
                machine.text(f"{RDMA}/{adapter}/device/{prefix}_{attribute}") or ""
                for prefix in ("current", "max")
            )
            if current and _number(current) < _number(maximum):
                yield failure(
                    machine,
                    f"{adapter}, its slot",
                    what=f"PCIe runs {template.format(current)}, and the adapter supports"
                    f" {template.format(maximum)}",
                    why="the slot, not the network, limits the adapter's rate",
                    remedy="reseat the adapter, or move it to a full-width slot; check the slot's"
                    " firmware settings",
                )


def _number(text: str) -> float:
    match = NUMBER.match(text)
    return float(match[0]) if match else 0.0


@frozen(kw_only=True)
class _PortMtu:
    machine: MachineRecording
    network: str
    port: str
    mtu: int
    sufficient: int = 0
    """MTU that suffices."""
    command: str
    """Command that sets the MTU, without the number."""


@check("packet-size", "the MTU is the same on all ports of a network")
def packet_size(examined: Examined) -> Iterator[DoctorFinding]:
    """Compare the ports of each network over all machines."""
    all_ports = [port for machine in examined.machines for port in _port_mtus(examined, machine)]
    for network in sorted({port.network for port in all_ports}):
        members = [port for port in all_ports if port.network == network]
        differing = list(minority(members, [port.mtu for port in members]))
        for port, mtu, majority in differing:
            yield failure(
                port.machine,
                port.port,
                what=f"its MTU is {mtu} bytes, and {majority} on other ports of {network}",
                why="larger packets are dropped on the way: small messages arrive and large"
                " ones hang",
                remedy=f"set the same value on all ports and switches: {port.command} {majority}",
            )
        for port in members:
            # Such a port has a finding already.
            is_minority = any(port is other for other, _, _ in differing)
            if port.mtu < port.sufficient and not is_minority:
                # 9000 is the usual size of jumbo frames.
                better = max(port.sufficient, 9000) if network == "RoCE" else port.sufficient
                yield warning(
                    port.machine,
                    port.port,
                    what=f"its MTU is {port.mtu} bytes, below the {port.sufficient} of RDMA's"
                    " largest packets",
                    why="messages go in more packets, with more headers and less bandwidth",
                    remedy=f"raise it on all ports and switches: {port.command} {better}",
                )


def _port_mtus(examined: Examined, machine: MachineRecording) -> Iterator[_PortMtu]:
    over_rdma, mtus = set[str](), rdma_mtus(machine)
    for port in _training_ports(examined, machine):
        over_rdma.update(port.interfaces)
        if port.is_ethernet and port.is_active:
            for name in port.interfaces:
                yield from _interface_mtu(machine, "RoCE", name, sufficient=MIN_ROCE_MTU)
        elif port.is_active and (port.adapter, port.number) in mtus:
            active, largest = mtus[port.adapter, port.number]
            yield _PortMtu(
                machine=machine,
                network="InfiniBand",
                port=port.name,
                mtu=active,
                sufficient=largest,
                command="in the subnet manager's partitions.conf, mtu of",
            )
    for npu in npu_ports(machine):
        if npu.mtu is not None:
            command = f"hccn_tool -i {npu.number} -mtu -s size"
            yield _PortMtu(
                machine=machine, network="the NPUs", port=npu.name, mtu=npu.mtu, command=command
            )
    socket_interface = _socket_interface(examined, machine)
    if socket_interface is not None and socket_interface not in over_rdma:
        yield from _interface_mtu(machine, "TCP", socket_interface, must_be_up=True)


def _interface_mtu(
    machine: MachineRecording,
    network: str,
    name: str,
    *,
    sufficient: int = 0,
    must_be_up: bool = False,
) -> Iterator[_PortMtu]:
    link = interface(machine, name)
    if link and link.mtu and (link.up or not must_be_up):
        yield _PortMtu(
            machine=machine,
            network=network,
            port=name,
            mtu=link.mtu,
            sufficient=sufficient,
            command=f"ip link set dev {name} mtu",
        )


def _socket_interface(examined: Examined, machine: MachineRecording) -> str | None:
    """Interface for sockets: the configured one or the first physical one in state up."""
    for variable in SOCKET_VARIABLES:
        choice = value(examined, machine, variable)
        if choice:
            return next(iter(chosen_interfaces(machine, choice)), None)
    for name in machine.names(INTERFACES):
        link = interface(machine, name)
        if link is not None and link.up and not name.startswith(NOT_PHYSICAL):
            return name
    return None


@check(
    "peer-memory",
    "adapters access device memory directly (GPUDirect RDMA)",
    needs=lambda examined: has_rdma(examined) and has_nvidia(examined),
)
def peer_memory(examined: Examined) -> Iterator[DoctorFinding]:
    """Check for the kernel module on machines with devices and ports."""
    for machine in examined.machines:
        modules = machine.text("proc/modules")
        if modules is None or not has_active_port(machine) or not gpus(machine):
            continue
        if PEER_MODULES.search(f"{modules}\n"):
            continue
        if OPEN_DRIVER in (machine.text(DRIVER_FILE) or ""):
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
