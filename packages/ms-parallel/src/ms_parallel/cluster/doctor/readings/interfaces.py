"""Network interfaces, as /sys/class/net lists them."""

from attrs import frozen

from ms_parallel.cluster.doctor.readings.number import whole
from ms_parallel.cluster.doctor.recording.recording import Recording

ROOT = "sys/class/net"


@frozen(kw_only=True)
class Interface:
    """One interface."""

    name: str
    up: bool
    mtu: int | None
    """Bytes of its largest packet."""
    rate_gbit_per_s: float | None


def interface(at: Recording, name: str) -> Interface | None:
    """Read the interface of a name; None where there is none."""
    folder = f"{ROOT}/{name}"
    state, mtu, speed = (at.text(f"{folder}/{what}") for what in ("operstate", "mtu", "speed"))
    if state is None and mtu is None:
        return None
    return Interface(
        name=name,
        up=state in ("up", "unknown"),
        mtu=whole(mtu),
        rate_gbit_per_s=(whole(speed) or 0) / 1000 or None,
    )


def interfaces(at: Recording) -> list[Interface]:
    """List the network interfaces of a machine."""
    found = (interface(at, name) for name in at.names(ROOT))
    return [one for one in found if one is not None]


def named_interfaces(at: Recording, choice: str) -> list[str]:
    """List the interfaces that a variable such as `NCCL_SOCKET_IFNAME` chooses.

    Args:
        at: the machine.
        choice: names or beginnings with commas between them; `=` before them asks for whole
            names, `^` for all others.
    """
    exact, others = "=" in choice[:2], "^" in choice[:2]
    words = [word for word in choice.lstrip("^=").split(",") if word]

    def named(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [name for name in at.names(ROOT) if named(name) != others]
