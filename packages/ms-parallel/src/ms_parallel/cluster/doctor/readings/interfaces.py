"""Network interfaces, from /sys/class/net."""

from attrs import frozen

from ms_parallel.cluster.doctor.readings.number import parse_int
from ms_parallel.cluster.doctor.recording.recording import Recording

ROOT = "sys/class/net"


@frozen(kw_only=True)
class Interface:
    """A network interface."""

    name: str
    up: bool
    mtu: int | None
    """Bytes of the largest packet."""
    rate_gbit_per_s: float | None


def interface(recording: Recording, name: str) -> Interface | None:
    """Read an interface by name; None if it does not exist."""
    folder = f"{ROOT}/{name}"
    state, mtu, speed = (
        recording.text(f"{folder}/{attribute}") for attribute in ("operstate", "mtu", "speed")
    )
    if state is None and mtu is None:
        return None
    return Interface(
        name=name,
        up=state in ("up", "unknown"),
        mtu=parse_int(mtu),
        rate_gbit_per_s=(parse_int(speed) or 0) / 1000 or None,
    )


def interfaces(recording: Recording) -> list[Interface]:
    """List all interfaces of a machine."""
    links = (interface(recording, name) for name in recording.names(ROOT))
    return [link for link in links if link is not None]


def named_interfaces(recording: Recording, choice: str) -> list[str]:
    """Interfaces selected by a variable such as `NCCL_SOCKET_IFNAME`.

    Args:
        recording: recording of the machine.
        choice: comma-separated names or prefixes; a leading `=` means full names, `^` all others.
    """
    exact, inverted = "=" in choice[:2], "^" in choice[:2]
    words = [word for word in choice.lstrip("^=").split(",") if word]

    def named(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [name for name in recording.names(ROOT) if named(name) != inverted]
