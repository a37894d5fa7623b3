"""Checks of variables that disable or restrict features of the collective libraries."""

import re
from collections.abc import Callable, Iterator
from typing import Final

from attrs import frozen

from ms_profile.doctor.checks import DoctorFinding, check, failure, minority, warning
from ms_profile.doctor.network import (
    INTERFACES,
    ON,
    chosen_interfaces,
    chosen_ports,
    has_active_port,
    has_rdma,
    interface,
    ports,
    value,
    variable,
)
from ms_profile.doctor.recording import Examined, MachineRecording
from ms_profile.doctor.vendor_tools import has_ascend, npu_driver, nvidia_driver

FindProblem = Callable[[MachineRecording, str], str]
"""Takes a machine and a value; returns the problem with it, or an empty text."""
SHARED: Final = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "HCCL_ALGO", "HCCL_BUFFSIZE")
"""Variables that both ends of a message must agree on."""
SOCKETS_IN_LOG: Final = re.compile(r"Using network Socket|NET/Socket : Using")
RDMA_IN_LOG: Final = re.compile(r"Using network IB|NET/IB : Using|via NET/IB")
NO_RDMA: Final = "messages between machines go over TCP sockets, at a fraction of the rate of RDMA"
NO_PEERS: Final = "messages between devices of a machine are copied through host memory"
NO_GPUDIRECT: Final = "every message between machines is copied through host memory"
INTERFACE_REMEDY: Final = "use an interface that reaches the other machines, or unset it"
LEVELS: Final = "PIX, PXB, PHB or SYS"
UNSET: Final = "unset it, or set it to 0"
UNREACHED: Final = "the library does not find a usable address, and the ranks cannot connect"


@frozen
class Variable:
    """A variable and the effect of setting it."""

    name: str
    find_problem: FindProblem
    why: str
    remedy: str = UNSET
    fails: bool = True
    """Failure rather than warning: it breaks a run or slows it down much."""


def _when_on(machine: MachineRecording, word: str) -> str:
    return "turned on" if word.lower() in ON else ""


def _when_on_with_rdma(machine: MachineRecording, word: str) -> str:
    return "turned on, although RDMA ports are up" * (
        has_active_port(machine) and word.lower() in ON
    )


def _when_sockets_chosen(machine: MachineRecording, word: str) -> str:
    # Other values name a plugin, which may well use RDMA.
    chooses_sockets = word.lower() in ("socket", "none")
    return "which excludes the RDMA ports that are up" * (
        has_active_port(machine) and chooses_sockets
    )


def _when_ports_excluded(machine: MachineRecording, word: str) -> str:
    active = [port for port in ports(machine) if port.is_active]
    selected = [port for port in chosen_ports(machine, word) if port.is_active]
    too_few = 0 < len(selected) < len(active)
    return f"which selects {len(selected)} of {len(active)} ports that are up" * too_few


def _when_gpudirect_forbidden(machine: MachineRecording, word: str) -> str:
    forbidden = word.upper() in ("LOC", "0")
    return "which lets no adapter access device memory" * (forbidden and has_active_port(machine))


def _when_interface_unusable(machine: MachineRecording, word: str) -> str:
    if not machine.names(INTERFACES):
        return ""
    selected = chosen_interfaces(machine, word)
    if not selected:
        names = ", ".join(machine.names(INTERFACES)[:8])
        return f"which matches no interface of this machine ({names})"
    links = [interface(machine, name) for name in selected]
    return "" if any(link and link.up for link in links) else "whose interface is down"


def _when_loopback(machine: MachineRecording, word: str) -> str:
    return _when_interface_unusable(machine, word) or "which reaches only this machine" * (
        chosen_interfaces(machine, word) == ["lo"]
    )


def _when_off(machine: MachineRecording, word: str) -> str:
    return "turned off" * (word == "0")


def _when_peers_forbidden(machine: MachineRecording, word: str) -> str:
    return "which forbids it" * (word.upper() in ("LOC", "0"))


def _when_tracing(machine: MachineRecording, word: str) -> str:
    return "which logs every operation" * (word.upper() == "TRACE")


VARIABLES: Final = (
    Variable("NCCL_IB_DISABLE", _when_on_with_rdma, NO_RDMA),
    Variable("NCCL_NET", _when_sockets_chosen, NO_RDMA, "unset it, or set it to IB"),
    Variable(
        "NCCL_IB_HCA",
        _when_ports_excluded,
        "the other ports stay idle",
        "list all ports that are meant for training, or unset it",
        fails=False,
    ),
    Variable("NCCL_P2P_DISABLE", _when_on, NO_PEERS),
    Variable("NCCL_P2P_LEVEL", _when_peers_forbidden, NO_PEERS, f"unset it, or name NVL, {LEVELS}"),
    Variable(
        "NCCL_SHM_DISABLE",
        _when_on,
        "processes of a machine without peer access between devices send over the network",
        "unset it, and give the container a larger /dev/shm instead",
    ),
    Variable(
        "NCCL_NET_GDR_LEVEL", _when_gpudirect_forbidden, NO_GPUDIRECT, f"unset it, or name {LEVELS}"
    ),
    Variable(
        "NCCL_IB_GDR_LEVEL",
        _when_gpudirect_forbidden,
        NO_GPUDIRECT,
        "unset it; it is now called NCCL_NET_GDR_LEVEL",
    ),
    Variable(
        "NCCL_DMABUF_ENABLE",
        _when_off,
        "without nvidia_peermem, adapters cannot access device memory",
        "unset it, or set it to 1",
        fails=False,
    ),
    Variable("NCCL_SOCKET_IFNAME", _when_loopback, UNREACHED, INTERFACE_REMEDY),
    Variable("GLOO_SOCKET_IFNAME", _when_interface_unusable, UNREACHED, INTERFACE_REMEDY),
    Variable("HCCL_SOCKET_IFNAME", _when_loopback, UNREACHED, INTERFACE_REMEDY),
    Variable("HCCL_P2P_DISABLE", _when_on, NO_PEERS),
    Variable(
        "NCCL_DEBUG",
        _when_tracing,
        "logging takes longer than small collectives",
        "set it to WARN",
        fails=False,
    ),
)


@check("variables", "no variable disables a feature of the collective libraries")
def variables(examined: Examined) -> Iterator[DoctorFinding]:
    """Check each rank's environment and NCCL's configuration files on its machine."""
    for recording in examined.ranks:
        machine = examined.machine_of(recording)
        for rule in VARIABLES:
            is_read = _is_read(recording, machine, rule.name)
            setting = variable(recording, machine, rule.name) if is_read else None
            problem = rule.find_problem(machine, setting[0]) if setting and setting[0] else ""
            if setting and problem:
                report = failure if rule.fails else warning
                yield report(
                    recording,
                    rule.name,
                    what=f"{rule.name}={setting[0]} (of {setting[1]}), {problem}",
                    why=rule.why,
                    remedy=rule.remedy,
                )


def _is_read(recording: MachineRecording, machine: MachineRecording, name: str) -> bool:
    """Return whether a library that reads the variable is used here."""
    if name.startswith("NCCL_"):
        return recording.machine.device == "cuda" or nvidia_driver(machine) is not None
    return not name.startswith("HCCL_") or npu_driver(machine) is not None


@check("hccl-variables", "HCCL's variables are consistent", needs=has_ascend)
def hccl_variables(examined: Examined) -> Iterator[DoctorFinding]:
    """Check HCCL's settings for links within a machine, and its allow list."""
    for recording in examined.ranks:
        if npu_driver(examined.machine_of(recording)) is None:
            continue
        pcie, roce = (
            value(examined, recording, f"HCCL_INTRA_{x}_ENABLE") for x in ("PCIE", "ROCE")
        )
        # Both on, or one off while the other is left at its default.
        if (pcie, roce) in (("1", "1"), ("0", ""), ("", "0")):
            yield failure(
                recording,
                "HCCL_INTRA_ROCE_ENABLE",
                what=f"HCCL_INTRA_PCIE_ENABLE is {pcie or 'not set'} and HCCL_INTRA_ROCE_ENABLE"
                f" {roce or 'not set'}, which HCCL does not support together",
                why="HCCL does not start, or uses another link than intended",
                remedy="unset both, or set one to 1 and the other to 0",
            )
        elif roce == "1":
            yield warning(
                recording,
                "HCCL_INTRA_ROCE_ENABLE",
                what="messages between devices of a machine go over RoCE",
                why="they use network bandwidth although HCCS or PCIe is free",
                remedy="unset it, unless the devices of the machine have no other link",
            )
        allow_list = value(examined, recording, "HCCL_WHITELIST_FILE")
        if value(examined, recording, "HCCL_WHITELIST_DISABLE") == "0" and not allow_list:
            yield failure(
                recording,
                "HCCL_WHITELIST_DISABLE",
                what="HCCL_WHITELIST_DISABLE=0 admits only listed addresses, but"
                " HCCL_WHITELIST_FILE is not set",
                why="HCCL admits no other machine, and the ranks cannot connect",
                remedy="set HCCL_WHITELIST_DISABLE=1, or set HCCL_WHITELIST_FILE",
            )


@check(
    "same-variables",
    "algorithm, protocol and buffer size of collectives are the same on all ranks",
    needs=lambda examined: len(examined.ranks) > 1,
)
def same_variables(examined: Examined) -> Iterator[DoctorFinding]:
    """Report ranks that differ from the majority."""
    for name in SHARED:
        values = [value(examined, recording, name) for recording in examined.ranks]
        for recording, setting, majority in minority(examined.ranks, values):
            yield failure(
                recording,
                name,
                what=f"{name} is {setting or 'not set'} here and {majority or 'not set'} on"
                " most other ranks",
                why="ranks send in one way and expect another: the run hangs",
                remedy=f"set {name}={majority} on all" if majority else f"unset {name}",
            )


@check(
    "transport",
    "NCCL reports that it uses RDMA",
    needs=lambda examined: bool(examined.measured.log) and has_rdma(examined),
)
def transport(examined: Examined) -> Iterator[DoctorFinding]:
    """Search NCCL's log of its initialization."""
    log = examined.measured.log
    # A log that names neither was cut off, or has another format.
    if RDMA_IN_LOG.search(log) or not SOCKETS_IN_LOG.search(log):
        return
    for machine in examined.machines:
        if has_active_port(machine):
            yield failure(
                machine,
                "NCCL",
                what="its log says that it uses sockets, although RDMA ports are up",
                why="messages between machines have a fraction of the rate",
                remedy="check NCCL_IB_DISABLE, NCCL_NET and NCCL_IB_HCA, libibverbs and"
                " /dev/infiniband in the container, and run with NCCL_DEBUG=INFO",
            )
