"""Ascend devices, driver, CANN and network ports, parsed from the output of their tools."""

import re

from attrs import frozen

from ms_parallel.cluster.doctor.readings.number import parse_int
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording

INSTALL_FILE = "usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info"
TOOL = "hccn_tool"
FIRST_LINE = re.compile(r"^\|\s*(\d{1,6})\s+(\S+)\s*\|\s*(\S+)\s*\|", re.MULTILINE)
VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
BUS = re.compile(r"^[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:")


@frozen(kw_only=True)
class Npu:
    """A device."""

    number: int
    name: str
    health: str
    """`OK`, or the problem."""


@frozen(kw_only=True)
class NpuPort:
    """RoCE port of a device; empty or None if unknown."""

    number: int
    link: str
    """`up` or `down`."""
    rate_gbit_per_s: float | None
    mtu: int | None
    health: str


def npu_driver(recording: Recording) -> str | None:
    """Version of the driver; None without one."""
    match = VERSION.search(recording.output("npu-smi info") or "")
    return match[1] if match else None


def has_ascend(examined: Examined) -> bool:
    """Return whether any machine has an Ascend driver."""
    return any(npu_driver(machine) for machine in examined.machines)


def cann(recording: Recording) -> str | None:
    """Version of CANN; None if not found."""
    for line in (recording.text(INSTALL_FILE) or "").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "version":
            return value.strip()
    return None


def npus(recording: Recording) -> list[Npu]:
    """Devices of a machine, from the first of the two lines of each in the table."""
    return [
        Npu(number=int(number), name=name, health=health)
        for number, name, health in FIRST_LINE.findall(recording.output("npu-smi info") or "")
        if not BUS.match(health)
    ]


def npu_ports(recording: Recording) -> list[NpuPort]:
    """Ports of the devices that the tool was queried for."""
    numbers = sorted(
        {int(words[2]) for words in map(str.split, recording.commands) if _asks_for_a_port(words)}
    )
    return [_port(recording, number) for number in numbers]


def has_npu_ports(examined: Examined) -> bool:
    """Return whether any machine has a port of an Ascend device."""
    return any(npu_ports(machine) for machine in examined.machines)


def port_questions(number: int) -> list[list[str]]:
    """Commands that query the port of a device."""
    return [
        [TOOL, "-i", str(number), f"-{option}", "-g"] for option in ("link", "speed", "mtu")
    ] + [[TOOL, "-i", str(number), "-net_health", "-g"]]


def _asks_for_a_port(words: list[str]) -> bool:
    return len(words) == 5 and words[:2] == [TOOL, "-i"] and parse_int(words[2]) is not None


def _port(recording: Recording, number: int) -> NpuPort:
    def answer(option: str, pattern: str) -> str:
        text = recording.output(TOOL, "-i", str(number), f"-{option}", "-g") or ""
        match = re.search(pattern, text, re.IGNORECASE)
        return match[1].strip().lower() if match else ""

    speed, mtu = answer("speed", r"speed\s*:\s*(\d{1,9})"), answer("mtu", r"mtu\D{0,3}(\d{1,9})")
    return NpuPort(
        number=number,
        link=answer("link", r"link status\s*:\s*(\w+)"),
        rate_gbit_per_s=int(speed) / 1000 if speed else None,
        mtu=int(mtu) if mtu else None,
        health=answer("net_health", r"health status\s*:\s*(.+)"),
    )
