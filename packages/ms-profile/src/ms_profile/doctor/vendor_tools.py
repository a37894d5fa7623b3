"""NVIDIA and Ascend devices, drivers and NPU ports, from the output of the vendors' tools."""

import re
from collections.abc import Iterator
from typing import Final

from attrs import frozen

from ms_profile.doctor.recording import Examined, MachineRecording
from ms_profile.doctor.versions import parse_int

DRIVER_FILE: Final = "proc/driver/nvidia/version"
IN_DRIVER_FILE: Final = re.compile(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s")
CANN_FILE: Final = "usr/local/Ascend/ascend-toolkit/latest/ascend_toolkit_install.info"
PORT_TOOL: Final = "hccn_tool"
NPU_LINE: Final = re.compile(r"^\|\s*(\d{1,6})\s+(\S+)\s*\|\s*(\S+)\s*\|", re.MULTILINE)
NPU_DRIVER: Final = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
BUS_ID: Final = re.compile(r"^[0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:")


@frozen(kw_only=True)
class Gpu:
    """A GPU in the output of `nvidia-smi -q`."""

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


def nvidia_driver(recording: MachineRecording) -> str | None:
    """Version of NVIDIA's driver; None without one."""
    for line in (recording.output("nvidia-smi -q") or "").splitlines():
        key, colon, value = line.partition(" : ")
        if colon and key.strip() == "Driver Version":
            return value.strip()
    match = IN_DRIVER_FILE.search(recording.text(DRIVER_FILE) or "")
    return match[1] if match else None


def has_nvidia(examined: Examined) -> bool:
    """Return whether any machine has an NVIDIA driver."""
    return any(nvidia_driver(machine) for machine in examined.machines)


def gpus(recording: MachineRecording) -> list[Gpu]:
    """GPUs of a machine."""
    text = recording.output("nvidia-smi -q") or ""
    # Alternates bus ids and reports, after the text before the first GPU.
    parts = re.split(r"^GPU ([0-9A-Fa-f]+:\S+)\s*$", text, flags=re.MULTILINE)[1:]
    devices = zip(parts[::2], parts[1::2], strict=True)
    return [Gpu(bus=bus, facts=dict(_facts(body))) for bus, body in devices]


def _facts(body: str) -> Iterator[tuple[str, str]]:
    """Parse lines of `key : value`, indented below their headings."""
    headings: list[tuple[int, str]] = []
    for line in filter(str.strip, body.splitlines()):
        indent = len(line) - len(line.lstrip())
        key, colon, value = line.partition(" : ")
        # A line ends all headings that are not less indented than it.
        headings = [heading for heading in headings if heading[0] < indent]
        if colon:
            yield " / ".join([*(name for _, name in headings), key.strip()]), value.strip()
        headings.append((indent, key.strip()))


@frozen(kw_only=True)
class Npu:
    """An Ascend device in the table of `npu-smi info`."""

    number: int
    name: str
    health: str
    """`OK`, or the problem."""


@frozen(kw_only=True)
class NpuPort:
    """RoCE port of an Ascend device; empty or None if unknown."""

    number: int
    link: str
    """`up` or `down`."""
    rate_gbit_per_s: float | None
    mtu: int | None
    health: str

    @property
    def name(self) -> str:
        """Name for findings."""
        return f"NPU {self.number}"


def npu_driver(recording: MachineRecording) -> str | None:
    """Version of the Ascend driver; None without one."""
    match = NPU_DRIVER.search(recording.output("npu-smi info") or "")
    return match[1] if match else None


def has_ascend(examined: Examined) -> bool:
    """Return whether any machine has an Ascend driver."""
    return any(npu_driver(machine) for machine in examined.machines)


def cann(recording: MachineRecording) -> str | None:
    """Version of CANN; None if not installed."""
    for line in (recording.text(CANN_FILE) or "").splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "version":
            return value.strip()
    return None


def npus(recording: MachineRecording) -> list[Npu]:
    """Ascend devices of a machine, parsed from the first of the two table lines of each device."""
    return [
        Npu(number=int(number), name=name, health=health)
        for number, name, health in NPU_LINE.findall(recording.output("npu-smi info") or "")
        # The second line of a device has its bus id in this column.
        if not BUS_ID.match(health)
    ]


def npu_ports(recording: MachineRecording) -> list[NpuPort]:
    """Ports of the Ascend devices that were queried by `port_commands`."""
    ports: list[NpuPort] = []
    for words in map(str.split, recording.commands):
        number = parse_int(words[2]) if words[:2] == [PORT_TOOL, "-i"] and len(words) == 5 else None
        if number is not None and number not in [port.number for port in ports]:
            ports.append(_npu_port(recording, number))
    return sorted(ports, key=lambda port: port.number)


def has_npu_ports(examined: Examined) -> bool:
    """Return whether any machine has a port of an Ascend device."""
    return any(npu_ports(machine) for machine in examined.machines)


def port_commands(number: int) -> list[list[str]]:
    """Commands that query the port of an Ascend device."""
    queries = ("link", "speed", "mtu", "net_health")
    return [[PORT_TOOL, "-i", str(number), f"-{query}", "-g"] for query in queries]


def _npu_port(recording: MachineRecording, number: int) -> NpuPort:
    def answer(query: str, pattern: str) -> str:
        text = recording.output(PORT_TOOL, "-i", str(number), f"-{query}", "-g") or ""
        match = re.search(pattern, text, re.IGNORECASE)
        return match[1].strip().lower() if match else ""

    speed, mtu = answer("speed", r"speed\s*:\s*(\d{1,9})"), answer("mtu", r"mtu\D{0,3}(\d{1,9})")
    return NpuPort(
        number=number,
        link=answer("link", r"link status\s*:\s*(\w+)"),
        rate_gbit_per_s=int(speed) / 1000 if speed else None,  # hccn_tool reports Mb/s
        mtu=int(mtu) if mtu else None,
        health=answer("net_health", r"health status\s*:\s*(.+)"),
    )
