"""Whether a variable turns off, or narrows, what the collective libraries could use."""

from collections.abc import Callable, Iterator

from attrs import frozen

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import has_ascend, npu_driver
from ms_parallel.cluster.doctor.readings.interfaces import ROOT as INTERFACES
from ms_parallel.cluster.doctor.readings.interfaces import interface, named_interfaces
from ms_parallel.cluster.doctor.readings.nvidia import driver
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, chosen_ports, ports
from ms_parallel.cluster.doctor.readings.variables import ON, value, variable
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

Judge = Callable[[Recording, str], str]
"""Takes a machine and a value; returns what is wrong with it, empty where nothing is."""
NO_RDMA = "messages between machines go over TCP sockets, at a fraction of the rate of RDMA"
NO_PEERS = "messages between devices of one machine are copied through host memory"
UNREACHED = "the library looks for an address that it does not find, and the ranks do not meet"


@frozen(kw_only=True)
class Variable:
    """A variable, and what it may cost."""

    name: str
    judge: Judge
    why: str
    remedy: str
    fails: bool = True
    """Whether it keeps a run from working or costs it much, and is not merely narrower."""


def _reaches(machine: Recording) -> bool:
    return any(port.state == ACTIVE for port in ports(machine))


def _on(machine: Recording, word: str) -> str:
    return "turned on" if word.lower() in ON else ""


def _on_with_rdma(machine: Recording, word: str) -> str:
    return "turned on, and there are RDMA ports that are up" * (
        _reaches(machine) and word.lower() in ON
    )


def _not_rdma(machine: Recording, word: str) -> str:
    chooses_sockets = word.lower() in ("socket", "none")
    return "which leaves out the RDMA ports that are up" * (_reaches(machine) and chooses_sockets)


def _few_ports(machine: Recording, word: str) -> str:
    active = [port for port in ports(machine) if port.state == ACTIVE]
    chosen = [port for port in chosen_ports(machine, word) if port.state == ACTIVE]
    few = 0 < len(chosen) < len(active)
    return f"which chooses {len(chosen)} of {len(active)} ports that are up" * few


def _near_only(machine: Recording, word: str) -> str:
    never = word.upper() in ("LOC", "0")
    return "which lets no adapter read the memory of a device" * (never and _reaches(machine))


def _absent_interface(machine: Recording, word: str) -> str:
    if not machine.names(INTERFACES):
        return ""
    chosen = named_interfaces(machine, word)
    if not chosen:
        known = ", ".join(machine.names(INTERFACES)[:8])
        return f"which names no interface of this machine ({known})"
    found = [interface(machine, name) for name in chosen]
    return "" if any(one and one.up for one in found) else "whose interface is down"


def _loopback(machine: Recording, word: str) -> str:
    return _absent_interface(machine, word) or "which reaches this machine alone" * (
        named_interfaces(machine, word) == ["lo"]
    )


def _off(machine: Recording, word: str) -> str:
    return "turned off" * (word == "0")


VARIABLES = (
    Variable(
        name="NCCL_IB_DISABLE",
        judge=_on_with_rdma,
        why=NO_RDMA,
        remedy="unset it, or set it to 0",
    ),
    Variable(name="NCCL_NET", judge=_not_rdma, why=NO_RDMA, remedy="unset it, or set it to IB"),
    Variable(
        name="NCCL_IB_HCA",
        judge=_few_ports,
        why="the other ports stay idle",
        remedy="name all ports that are meant for training, or unset it",
        fails=False,
    ),
    Variable(name="NCCL_P2P_DISABLE", judge=_on, why=NO_PEERS, remedy="unset it, or set it to 0"),
    Variable(
        name="NCCL_P2P_LEVEL",
        judge=lambda machine, word: "which forbids it" * (word.upper() in ("LOC", "0")),
        why=NO_PEERS,
        remedy="unset it, or name NVL, PIX, PXB, PHB or SYS",
    ),
    Variable(
        name="NCCL_SHM_DISABLE",
        judge=_on,
        why="processes of one machine that cannot reach each other's devices send over the network",
        remedy="unset it, and give the container a larger /dev/shm instead",
    ),
    Variable(
        name="NCCL_NET_GDR_LEVEL",
        judge=_near_only,
        why="each message between machines is copied through host memory",
        remedy="unset it, or name PIX, PXB, PHB or SYS",
    ),
    Variable(
        name="NCCL_IB_GDR_LEVEL",
        judge=_near_only,
        why="each message between machines is copied through host memory",
        remedy="unset it; its present name is NCCL_NET_GDR_LEVEL",
    ),
    Variable(
        name="NCCL_DMABUF_ENABLE",
        judge=_off,
        why="without nvidia_peermem, adapters cannot read the memory of devices",
        remedy="unset it, or set it to 1",
        fails=False,
    ),
    Variable(
        name="NCCL_SOCKET_IFNAME",
        judge=_loopback,
        why=UNREACHED,
        remedy="name an interface that reaches the other machines, or unset it",
    ),
    Variable(
        name="GLOO_SOCKET_IFNAME",
        judge=_absent_interface,
        why=UNREACHED,
        remedy="name an interface that reaches the other machines, or unset it",
    ),
    Variable(
        name="HCCL_SOCKET_IFNAME",
        judge=_loopback,
        why=UNREACHED,
        remedy="name an interface that reaches the other machines, or unset it",
    ),
    Variable(
        name="HCCL_P2P_DISABLE",
        judge=_on,
        why=NO_PEERS,
        remedy="unset it, or set it to 0",
    ),
    Variable(
        name="NCCL_DEBUG",
        judge=lambda machine, word: (
            "which writes a line for each operation" * (word.upper() == "TRACE")
        ),
        why="writing takes longer than small collectives do",
        remedy="set it to WARN",
        fails=False,
    ),
)


@check("variables", "no variable turns off what the collective libraries could use")
def variables(examined: Examined) -> Iterator[Finding]:
    """Look at each rank, and at NCCL's own files on its machine."""
    for one in examined.ranks:
        machine = examined.machine_of(one.machine.rank)
        for each in VARIABLES:
            found = variable(one, machine, each.name) if _is_read(one, machine, each.name) else None
            wrong = each.judge(machine, found[0]) if found and found[0] else ""
            if found and wrong:
                say = failure if each.fails else warning
                yield say(
                    one,
                    each.name,
                    what=f"{each.name}={found[0]} (of {found[1]}), {wrong}",
                    why=each.why,
                    remedy=each.remedy,
                )


def _is_read(one: Recording, machine: Recording, name: str) -> bool:
    """Return whether a library that reads the variable carries messages here."""
    if name.startswith("NCCL_"):
        return one.machine.device == "cuda" or driver(machine) is not None
    return not name.startswith("HCCL_") or npu_driver(machine) is not None


@check("hccl-variables", "HCCL's variables go together", needs=has_ascend)
def hccl_variables(examined: Examined) -> Iterator[Finding]:
    """HCCL's own pairs of variables: links inside a machine, and the list of those let in."""
    for one in examined.ranks:
        if npu_driver(examined.machine_of(one.machine.rank)) is None:
            continue
        pcie, roce = (value(examined, one, f"HCCL_INTRA_{x}_ENABLE") for x in ("PCIE", "ROCE"))
        if (pcie, roce) in (("1", "1"), ("0", ""), ("", "0")):
            yield failure(
                one,
                "HCCL_INTRA_ROCE_ENABLE",
                what=f"HCCL_INTRA_PCIE_ENABLE is {pcie or 'not set'} and HCCL_INTRA_ROCE_ENABLE"
                f" {roce or 'not set'}, which HCCL does not support together",
                why="HCCL refuses to start, or takes another link than is meant",
                remedy="unset both, or set one to 1 and the other to 0",
            )
        elif roce == "1":
            yield warning(
                one,
                "HCCL_INTRA_ROCE_ENABLE",
                what="messages between devices of one machine go over RoCE",
                why="they take bandwidth from those between machines, where HCCS or PCIe is free",
                remedy="unset it, unless the devices of the machine have no other link",
            )
        listed = value(examined, one, "HCCL_WHITELIST_FILE")
        if value(examined, one, "HCCL_WHITELIST_DISABLE") == "0" and not listed:
            yield failure(
                one,
                "HCCL_WHITELIST_DISABLE",
                what="HCCL_WHITELIST_DISABLE=0 lets in only listed addresses, and"
                " HCCL_WHITELIST_FILE names no list",
                why="HCCL lets no other machine in, and the ranks do not meet",
                remedy="set HCCL_WHITELIST_DISABLE=1, or name the list",
            )
