"""RDMA ports, network interfaces, and variables of the collective libraries that select them."""

import re
from collections.abc import Callable, Iterator
from typing import Final

from attrs import frozen

from ms_profile.doctor.recording import Examined, MachineRecording
from ms_profile.doctor.versions import parse_int

RDMA: Final = "sys/class/infiniband"
INTERFACES: Final = "sys/class/net"
NCCL_FILES: Final = ("home/.nccl.conf", "etc/nccl.conf")
"""Configuration files of NCCL for variables that are not set, the user's first."""
ON: Final = ("1", "true", "yes")
RATE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(?:Gb/sec)?(?:\s*\((\d{1,3})X)?")


@frozen(kw_only=True)
class Port:
    """A port of an InfiniBand or RoCE adapter."""

    adapter: str
    """Name of the adapter, such as `mlx5_0`."""
    number: int
    adapter_type: str
    """Type of the adapter, such as `MT4129`; empty if unknown."""
    state: str
    """`active`, `down`, `init` or `armed`."""
    physical: str
    rate_gbit_per_s: float | None
    layer: str
    """`InfiniBand`, or `Ethernet` for RoCE."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of the adapter."""

    @property
    def name(self) -> str:
        """Name for findings."""
        return f"{self.adapter} port {self.number}"

    @property
    def is_active(self) -> bool:
        """Whether the port is up."""
        return self.state == "active"

    @property
    def is_ethernet(self) -> bool:
        """Whether the port uses RoCE."""
        return self.layer.lower() == "ethernet"


def ports(recording: MachineRecording) -> list[Port]:
    """Ports of a machine, from /sys/class/infiniband or `ibstat`."""
    return list(_from_sysfs(recording)) or list(_from_ibstat(recording.output("ibstat") or ""))


def has_rdma(examined: Examined) -> bool:
    """Return whether any machine has an RDMA port."""
    return any(ports(machine) for machine in examined.machines)


def has_active_port(machine: MachineRecording) -> bool:
    """Return whether an RDMA port of a machine is up."""
    return any(port.is_active for port in ports(machine))


def chosen_ports(recording: MachineRecording, choice: str) -> list[Port]:
    """Ports that NCCL uses: all, or those selected by `NCCL_IB_HCA`.

    Args:
        recording: recording of the machine.
        choice: comma-separated names or prefixes, each optionally with `:PORT`; a leading `=`
            means full names, `^` all others. Empty selects all.
    """
    words, matches, inverted = _selectors(choice)
    if not words:
        return ports(recording)

    def selected(port: Port) -> bool:
        for word in words:
            adapter, _, number = word.partition(":")
            if matches(port.adapter, adapter) and number in ("", str(port.number)):
                return True
        return False

    return [port for port in ports(recording) if selected(port) != inverted]


def _selectors(choice: str) -> tuple[list[str], Callable[[str, str], bool], bool]:
    """Parse an NCCL selection: words, matching function, whether it is inverted."""
    words = [word.strip() for word in choice.lstrip("^=").split(",") if word.strip()]
    # NCCL accepts `^`, `=` and `^=` before the list.
    return words, str.__eq__ if "=" in choice[:2] else str.startswith, "^" in choice[:2]


def _from_sysfs(recording: MachineRecording) -> Iterator[Port]:
    for adapter in recording.names(RDMA):
        for number in recording.names(f"{RDMA}/{adapter}/ports"):
            if parse_int(number) is None:
                continue
            folder = f"{RDMA}/{adapter}/ports/{number}"
            yield Port(
                adapter=adapter,
                number=int(number),
                adapter_type=recording.text(f"{RDMA}/{adapter}/hca_type") or "",
                state=_after_colon(recording.text(f"{folder}/state")),
                physical=_after_colon(recording.text(f"{folder}/phys_state")),
                rate_gbit_per_s=_rate(recording.text(f"{folder}/rate")),
                layer=recording.text(f"{folder}/link_layer") or "",
                interfaces=tuple(recording.names(f"{RDMA}/{adapter}/device/net")),
            )


def _after_colon(text: str | None) -> str:
    """Return the word after the colon in lower case: `active` for `4: ACTIVE`."""
    return (text or "").rpartition(":")[2].strip().lower()


def _rate(text: str | None) -> float | None:
    match = RATE.match(text or "")
    return (float(match[1]) or None) if match else None


def _from_ibstat(text: str) -> Iterator[Port]:
    """Parse the output of `ibstat`: adapters, then ports, then `key: value`."""
    # CA 'mlx5_0' begins an adapter, "Port 1:" one of its ports.
    for adapter in re.split(r"^CA '", text, flags=re.MULTILINE)[1:]:
        name, _, remainder = adapter.partition("'")
        head, *sections = re.split(r"^\s*Port (\d{1,6}):\s*$", remainder, flags=re.MULTILINE)
        for number, body in zip(sections[::2], sections[1::2], strict=True):
            facts = _key_values(body)
            yield Port(
                adapter=name,
                number=int(number),
                adapter_type=_key_values(head).get("CA type", ""),
                state=facts.get("State", "").lower(),
                physical=facts.get("Physical state", "").lower(),
                rate_gbit_per_s=_rate(facts.get("Rate")),
                layer=facts.get("Link layer", ""),
            )


def _key_values(text: str) -> dict[str, str]:
    """First value of each key in lines of `key: value`."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            values.setdefault(key.strip(), value.strip())
    return values


def rdma_mtus(recording: MachineRecording) -> dict[tuple[str, int], tuple[int, int]]:
    """Active and maximum MTU in bytes by adapter and port number, from `ibv_devinfo`."""
    mtus = {}
    output = recording.output("ibv_devinfo") or ""
    for adapter in re.split(r"^hca_id:", output, flags=re.MULTILINE)[1:]:
        name = adapter.split(maxsplit=1)[0] if adapter.strip() else ""
        _, *sections = re.split(r"^\s*port:\s*(\d{1,6})\s*$", adapter, flags=re.MULTILINE)
        for number, body in zip(sections[::2], sections[1::2], strict=True):
            facts = _key_values(body)
            active, maximum = (
                parse_int(facts.get(key, "").split("(")[0]) for key in ("active_mtu", "max_mtu")
            )
            if active and maximum:
                mtus[name, int(number)] = active, maximum
    return mtus


@frozen(kw_only=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    mtu: int | None
    """Bytes of the largest packet."""


def interface(recording: MachineRecording, name: str) -> Interface | None:
    """Read an interface by name; None if it does not exist."""
    state, mtu = (
        recording.text(f"{INTERFACES}/{name}/{attribute}") for attribute in ("operstate", "mtu")
    )
    if state is None and mtu is None:
        return None
    # Loopback and some virtual interfaces report "unknown" although they are up.
    return Interface(name=name, up=state in ("up", "unknown"), mtu=parse_int(mtu))


def chosen_interfaces(recording: MachineRecording, choice: str) -> list[str]:
    """Interfaces selected by a variable such as `NCCL_SOCKET_IFNAME`, as in `chosen_ports`."""
    words, matches, inverted = _selectors(choice)
    return [
        name
        for name in recording.names(INTERFACES)
        if any(matches(name, word) for word in words) != inverted
    ]


def variable(
    recording: MachineRecording, machine: MachineRecording, name: str
) -> tuple[str, str] | None:
    """Return the value of a variable and its source; None if it is not set.

    Args:
        recording: recording of the rank.
        machine: recording of its machine, with NCCL's configuration files.
        name: name of the variable.
    """
    if name in recording.machine.environment:
        return recording.machine.environment[name].strip(), "the environment"
    for path in NCCL_FILES if name.startswith("NCCL_") else ():
        for line in (machine.text(path) or "").splitlines():
            key, _, value = line.partition("#")[0].partition("=")
            if key.strip() == name:
                return value.strip(), f"/{path}" if path.startswith("etc") else f"~/{path[5:]}"
    return None


def value(examined: Examined, recording: MachineRecording, name: str) -> str:
    """Value of a variable on a rank; empty if not set."""
    setting = variable(recording, examined.machine_of(recording), name)
    return setting[0] if setting else ""
