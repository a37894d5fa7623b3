"""NVIDIA's devices and driver, as `nvidia-smi -q` prints them."""

import re
from collections.abc import Iterator

from attrs import frozen

from ms_parallel.cluster.doctor.recording.recording import Examined, Recording

DRIVER_FILE = "proc/driver/nvidia/version"
IN_DRIVER_FILE = re.compile(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s")


@frozen(kw_only=True)
class Gpu:
    """One device."""

    bus: str
    facts: dict[str, str]
    """Values by the headings above them and their key, with ` / ` between."""

    def fact(self, *ends: str) -> str:
        """Find the first value whose path ends so, of the ends in turn; empty if there is none."""
        for end in ends:
            for path, value in self.facts.items():
                if path == end or path.endswith(f" / {end}"):
                    return value
        return ""

    @property
    def name(self) -> str:
        """Name of the card, such as `NVIDIA H100 80GB HBM3`."""
        return self.fact("Product Name")


def driver(at: Recording) -> str | None:
    """Version of the driver; None where there is none."""
    for line in (at.output("nvidia-smi -q") or "").splitlines():
        key, colon, value = line.partition(" : ")
        if colon and key.strip() == "Driver Version":
            return value.strip()
    found = IN_DRIVER_FILE.search(at.text(DRIVER_FILE) or "")
    return found[1] if found else None


def has_nvidia(examined: Examined) -> bool:
    """Return whether any machine has an NVIDIA driver."""
    return any(driver(machine) for machine in examined.machines)


def gpus(at: Recording) -> list[Gpu]:
    """List the GPUs of a machine."""
    text = at.output("nvidia-smi -q") or ""
    parts = re.split(r"^GPU ([0-9A-Fa-f]+:\S+)\s*$", text, flags=re.MULTILINE)[1:]
    each = zip(parts[::2], parts[1::2], strict=True)
    return [Gpu(bus=bus, facts=dict(_facts(body))) for bus, body in each]


def _facts(body: str) -> Iterator[tuple[str, str]]:
    """Lines of `key : value`, indented below the headings that they belong to."""
    above: list[tuple[int, str]] = []
    for line in body.splitlines():
        indent = len(line) - len(line.lstrip())
        key, colon, value = line.partition(" : ")
        if not line.strip():
            continue
        above = [one for one in above if one[0] < indent]
        if colon:
            yield " / ".join([*(name for _, name in above), key.strip()]), value.strip()
        above.append((indent, key.strip()))
