"""RDMA ports of a machine, from /sys/class/infiniband or `ibstat`."""

import re
from collections.abc import Iterator

from attrs import frozen

from ms_parallel.cluster.doctor.readings.number import parse_int
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording

ROOT = "sys/class/infiniband"
ACTIVE = "active"
RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(?:Gb/sec)?(?:\s*\((\d{1,3})X)?")
GIGABIT = 1e9 / 8


@frozen(kw_only=True)
class Port:
    """A port of an InfiniBand or RoCE adapter."""

    adapter: str
    """Name of the adapter, such as `mlx5_0`."""
    number: int
    kind: str
    """Type of the adapter, such as `MT4129`; empty if unknown."""
    state: str
    """`active`, `down`, `init` or `armed`."""
    physical: str
    rate_gbit_per_s: float | None
    lanes: int | None
    layer: str
    """`InfiniBand`, or `Ethernet` for RoCE."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of the adapter."""

    @property
    def name(self) -> str:
        """Name in the form of `NCCL_IB_HCA`."""
        return f"{self.adapter}:{self.number}"

    @property
    def is_ethernet(self) -> bool:
        """Whether the port uses RoCE."""
        return self.layer.lower() == "ethernet"


def ports(recording: Recording) -> list[Port]:
    """Ports of a machine."""
    sysfs_ports = list(_from_sysfs(recording))
    return sysfs_ports or list(_from_ibstat(recording.output("ibstat") or ""))


def has_rdma(examined: Examined) -> bool:
    """Return whether any machine has an RDMA port."""
    return any(ports(machine) for machine in examined.machines)


def chosen_ports(recording: Recording, choice: str) -> list[Port]:
    """Ports that NCCL uses: all, or those selected by `NCCL_IB_HCA`.

    Args:
        recording: recording of the machine.
        choice: comma-separated names or prefixes; a leading `=` means full names, `^` all others.
            Empty selects all.
    """
    exact = "=" in choice[:2]
    inverted = "^" in choice[:2]
    selectors = [word.strip() for word in choice.lstrip("^=").split(",") if word.strip()]
    if not selectors:
        return ports(recording)

    def named(port: Port) -> bool:
        for word in selectors:
            adapter, _, number = word.partition(":")
            same = port.adapter == adapter if exact else port.adapter.startswith(adapter)
            if same and number in ("", str(port.number)):
                return True
        return False

    return [port for port in ports(recording) if named(port) != inverted]


def _from_sysfs(recording: Recording) -> Iterator[Port]:
    for adapter in recording.names(ROOT):
        for number in recording.names(f"{ROOT}/{adapter}/ports"):
            if parse_int(number) is None:
                continue
            folder = f"{ROOT}/{adapter}/ports/{number}"
            rate, lanes = _rate(recording.text(f"{folder}/rate"))
            yield Port(
                adapter=adapter,
                number=int(number),
                kind=recording.text(f"{ROOT}/{adapter}/hca_type") or "",
                state=_word(recording.text(f"{folder}/state")),
                physical=_word(recording.text(f"{folder}/phys_state")),
                rate_gbit_per_s=rate,
                lanes=lanes,
                layer=recording.text(f"{folder}/link_layer") or "",
                interfaces=tuple(recording.names(f"{ROOT}/{adapter}/device/net")),
            )


def _word(text: str | None) -> str:
    """Return the word after the colon in lower case: `active` for `4: ACTIVE`."""
    return (text or "").rpartition(":")[2].strip().lower()


def _rate(text: str | None) -> tuple[float | None, int | None]:
    match = RATE.match(text or "")
    if match is None or not float(match[1]):
        return None, None
    return float(match[1]), int(match[2]) if match[2] else None


def _from_ibstat(text: str) -> Iterator[Port]:
    """Parse the output of `ibstat`: adapters, then ports, then `key: value`."""
    for adapter in re.split(r"^CA '", text, flags=re.MULTILINE)[1:]:
        name, _, remainder = adapter.partition("'")
        head, *sections = re.split(r"^\s*Port (\d{1,6}):\s*$", remainder, flags=re.MULTILINE)
        for number, body in zip(sections[::2], sections[1::2], strict=True):
            facts = pairs_of(body)
            rate, lanes = _rate(facts.get("Rate"))
            yield Port(
                adapter=name,
                number=int(number),
                kind=pairs_of(head).get("CA type", ""),
                state=facts.get("State", "").lower(),
                physical=facts.get("Physical state", "").lower(),
                rate_gbit_per_s=rate,
                lanes=lanes,
                layer=facts.get("Link layer", ""),
            )


def pairs_of(text: str) -> dict[str, str]:
    """First value of each key in lines of `key: value`."""
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            pairs.setdefault(key.strip(), value.strip())
    return pairs


def packet_bytes(recording: Recording) -> dict[str, tuple[int, int]]:
    """Active and maximum MTU in bytes of each port by name, from `ibv_devinfo`."""
    mtus = {}
    for adapter in re.split(r"^hca_id:", recording.output("ibv_devinfo") or "", flags=re.MULTILINE)[
        1:
    ]:
        name = adapter.split(maxsplit=1)[0] if adapter.strip() else ""
        _, *sections = re.split(r"^\s*port:\s*(\d{1,6})\s*$", adapter, flags=re.MULTILINE)
        for number, body in zip(sections[::2], sections[1::2], strict=True):
            facts = pairs_of(body)
            active, maximum = (
                parse_int(facts.get(key, "").split("(")[0]) for key in ("active_mtu", "max_mtu")
            )
            if active and maximum:
                mtus[f"{name}:{int(number)}"] = active, maximum
    return mtus
