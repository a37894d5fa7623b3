"""Ascend devices, their driver, CANN and network ports, as their tools print them."""

import re

from attrs import frozen

from ms_parallel.cluster.doctor.readings.number import whole
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording

INSTALL_FILE = "usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info"
TOOL = "hccn_tool"
FIRST_LINE = re.compile(r"^\|\s*(\d{1,6})\s+(\S+)\s*\|\s*(\S+)\s*\|", re.MULTILINE)
VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
BUS = re.compile(r"^[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:")


@frozen(kw_only=True)
class Npu:
    """One device."""

    number: int
    name: str
    health: str
    """`OK`, or what is wrong."""


@frozen(kw_only=True)
class NpuPort:
    """The RoCE port of one device; empty or None where the tool did not say."""

    number: int
    link: str
    """In small letters: `up` or `down`."""
    rate_gbit_per_s: float | None
    mtu: int | None
    health: str


def npu_driver(at: Recording) -> str | None:
    """Version of the driver; None where there is none."""
    found = VERSION.search(at.output("npu-smi info") or "")
    return found[1] if found else None


def has_ascend(examined: Examined) -> bool:
    """Return whether any machine has an Ascend driver."""
    return any(npu_driver(machine) for machine in examined.machines)


def cann(at: Recording) -> str | None:
    """Version of CANN; None where it is not found."""
    for line in (at.text(INSTALL_FILE) or "").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "version":
            return value.strip()
    return None


def npus(at: Recording) -> list[Npu]:
    """List the NPUs of a machine, each from the first of its two lines in the table."""
    return [
        Npu(number=int(number), name=name, health=health)
        for number, name, health in FIRST_LINE.findall(at.output("npu-smi info") or "")
        if not BUS.match(health)
    ]


def npu_ports(at: Recording) -> list[NpuPort]:
    """List the port of each device that the tool was asked about."""
    numbers = sorted(
        {int(words[2]) for words in map(str.split, at.commands) if _asks_for_a_port(words)}
    )
    return [_port(at, number) for number in numbers]


def has_npu_ports(examined: Examined) -> bool:
    """Return whether any machine has the port of an NPU."""
    return any(npu_ports(machine) for machine in examined.machines)


def port_questions(number: int) -> list[list[str]]:
    """List the commands that ask the tool about the port of a device."""
    return [[TOOL, "-i", str(number), f"-{what}", "-g"] for what in ("link", "speed", "mtu")] + [
        [TOOL, "-i", str(number), "-net_health", "-g"]
    ]


def _asks_for_a_port(words: list[str]) -> bool:
    return len(words) == 5 and words[:2] == [TOOL, "-i"] and whole(words[2]) is not None


def _port(at: Recording, number: int) -> NpuPort:
    def answer(what: str, pattern: str) -> str:
        text = at.output(TOOL, "-i", str(number), f"-{what}", "-g") or ""
        found = re.search(pattern, text, re.IGNORECASE)
        return found[1].strip().lower() if found else ""

    speed, mtu = answer("speed", r"speed\s*:\s*(\d{1,9})"), answer("mtu", r"mtu\D{0,3}(\d{1,9})")
    return NpuPort(
        number=number,
        link=answer("link", r"link status\s*:\s*(\w+)"),
        rate_gbit_per_s=int(speed) / 1000 if speed else None,
        mtu=int(mtu) if mtu else None,
        health=answer("net_health", r"health status\s*:\s*(.+)"),
    )
