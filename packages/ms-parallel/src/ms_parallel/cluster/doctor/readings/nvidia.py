"""NVIDIA devices and driver, from `nvidia-smi -q`."""

import re
from collections.abc import Iterator

from attrs import frozen

from ms_parallel.cluster.doctor.recording.recording import Examined, Recording

DRIVER_FILE = "proc/driver/nvidia/version"
IN_DRIVER_FILE = re.compile(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s")


@frozen(kw_only=True)
class Gpu:
    """A device."""

    bus: str
    facts: dict[str, str]
    """Values by path: the headings above and the key, joined with ` / `."""

    def fact(self, *ends: str) -> str:
        """Return the first value whose path ends with one of `ends`, or an empty text."""
        for end in ends:
            for path, value in self.facts.items():
                if path == end or path.endswith(f" / {end}"):
                    return value
        return ""

    @property
    def name(self) -> str:
        """Name of the card, such as `NVIDIA H100 80GB HBM3`."""
        return self.fact("Product Name")


def driver(recording: Recording) -> str | None:
    """Version of the driver; None without one."""
    for line in (recording.output("nvidia-smi -q") or "").splitlines():
        key, colon, value = line.partition(" : ")
        if colon and key.strip() == "Driver Version":
            return value.strip()
    match = IN_DRIVER_FILE.search(recording.text(DRIVER_FILE) or "")
    return match[1] if match else None


def has_nvidia(examined: Examined) -> bool:
    """Return whether any machine has an NVIDIA driver."""
    return any(driver(machine) for machine in examined.machines)


def gpus(recording: Recording) -> list[Gpu]:
    """Devices of a machine."""
    text = recording.output("nvidia-smi -q") or ""
    parts = re.split(r"^GPU ([0-9A-Fa-f]+:\S+)\s*$", text, flags=re.MULTILINE)[1:]
    devices = zip(parts[::2], parts[1::2], strict=True)
    return [Gpu(bus=bus, facts=dict(_facts(body))) for bus, body in devices]


def _facts(body: str) -> Iterator[tuple[str, str]]:
    """Parse lines of `key : value`, indented below their headings."""
    headings: list[tuple[int, str]] = []
    for line in body.splitlines():
        indent = len(line) - len(line.lstrip())
        key, colon, value = line.partition(" : ")
        if not line.strip():
            continue
        headings = [heading for heading in headings if heading[0] < indent]
        if colon:
            yield " / ".join([*(name for _, name in headings), key.strip()]), value.strip()
        headings.append((indent, key.strip()))
