"""The RDMA ports of a machine, as /sys/class/infiniband lists them, or else `ibstat`."""

import re
from collections.abc import Iterator

from attrs import frozen

from ms_parallel.cluster.doctor.readings.number import whole
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording

ROOT = "sys/class/infiniband"
ACTIVE = "active"
RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?)\s*(?:Gb/sec)?(?:\s*\((\d{1,3})X)?")
GIGABIT = 1e9 / 8


@frozen(kw_only=True)
class Port:
    """One port of an adapter for InfiniBand or RoCE."""

    adapter: str
    """Name of the adapter, such as `mlx5_0`."""
    number: int
    kind: str
    """What the adapter says it is, such as `MT4129`; empty where it does not."""
    state: str
    """In small letters: `active`, `down`, `init`, `armed`."""
    physical: str
    rate_gbit_per_s: float | None
    lanes: int | None
    layer: str
    """`InfiniBand`, or `Ethernet` for RoCE."""
    interfaces: tuple[str, ...] = ()
    """Network interfaces of the adapter."""

    @property
    def name(self) -> str:
        """As `NCCL_IB_HCA` names it."""
        return f"{self.adapter}:{self.number}"

    @property
    def is_ethernet(self) -> bool:
        """Whether it speaks RoCE."""
        return self.layer.lower() == "ethernet"


def ports(at: Recording) -> list[Port]:
    """List the ports of a machine."""
    found = list(_listed(at))
    return found or list(_printed(at.output("ibstat") or ""))


def has_rdma(examined: Examined) -> bool:
    """Return whether any machine has a port."""
    return any(ports(machine) for machine in examined.machines)


def chosen_ports(at: Recording, choice: str) -> list[Port]:
    """List the ports that NCCL takes: all, or those that `NCCL_IB_HCA` names.

    Args:
        at: the machine.
        choice: names or beginnings of names with commas between them; `=` before them asks for
            whole names, `^` for all others. Empty chooses all.
    """
    exact = "=" in choice[:2]
    others = "^" in choice[:2]
    wanted = [word.strip() for word in choice.lstrip("^=").split(",") if word.strip()]
    if not wanted:
        return ports(at)

    def named(port: Port) -> bool:
        for word in wanted:
            adapter, _, number = word.partition(":")
            same = port.adapter == adapter if exact else port.adapter.startswith(adapter)
            if same and number in ("", str(port.number)):
                return True
        return False

    return [port for port in ports(at) if named(port) != others]


def _listed(at: Recording) -> Iterator[Port]:
    for adapter in at.names(ROOT):
        for number in at.names(f"{ROOT}/{adapter}/ports"):
            if whole(number) is None:
                continue
            folder = f"{ROOT}/{adapter}/ports/{number}"
            rate, lanes = _rate(at.text(f"{folder}/rate"))
            yield Port(
                adapter=adapter,
                number=int(number),
                kind=at.text(f"{ROOT}/{adapter}/hca_type") or "",
                state=_word(at.text(f"{folder}/state")),
                physical=_word(at.text(f"{folder}/phys_state")),
                rate_gbit_per_s=rate,
                lanes=lanes,
                layer=at.text(f"{folder}/link_layer") or "",
                interfaces=tuple(at.names(f"{ROOT}/{adapter}/device/net")),
            )


def _word(text: str | None) -> str:
    """Return the word of a text such as `4: ACTIVE`, in lower case."""
    return (text or "").rpartition(":")[2].strip().lower()


def _rate(text: str | None) -> tuple[float | None, int | None]:
    found = RATE.match(text or "")
    if found is None or not float(found[1]):
        return None, None
    return float(found[1]), int(found[2]) if found[2] else None


def _printed(text: str) -> Iterator[Port]:
    """Read the ports that `ibstat` prints: adapters, below them ports, below them `key: value`."""
    for adapter in re.split(r"^CA '", text, flags=re.MULTILINE)[1:]:
        name, _, rest = adapter.partition("'")
        head, *each = re.split(r"^\s*Port (\d{1,6}):\s*$", rest, flags=re.MULTILINE)
        for number, body in zip(each[::2], each[1::2], strict=True):
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
    """Read the first value of each key in lines of `key: value`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def packet_bytes(at: Recording) -> dict[str, tuple[int, int]]:
    """Read the active and the largest MTU of each port by name, in bytes, from `ibv_devinfo`."""
    found = {}
    for adapter in re.split(r"^hca_id:", at.output("ibv_devinfo") or "", flags=re.MULTILINE)[1:]:
        name = adapter.split(maxsplit=1)[0] if adapter.strip() else ""
        _, *each = re.split(r"^\s*port:\s*(\d{1,6})\s*$", adapter, flags=re.MULTILINE)
        for number, body in zip(each[::2], each[1::2], strict=True):
            facts = pairs_of(body)
            active, most = (
                whole(facts.get(key, "").split("(")[0]) for key in ("active_mtu", "max_mtu")
            )
            if active and most:
                found[f"{name}:{int(number)}"] = active, most
    return found
