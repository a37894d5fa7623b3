"""Check that ports run at their full rate."""

import re
from collections.abc import Iterator

from attrs import frozen

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import has_npu_ports, npu_ports
from ms_parallel.cluster.doctor.readings.ports import ACTIVE, ROOT, chosen_ports, has_rdma
from ms_parallel.cluster.doctor.readings.tables import tables
from ms_parallel.cluster.doctor.readings.variables import value
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

NUMBER = re.compile(r"\d{1,6}(\.\d{1,3})?")


@frozen(kw_only=True)
class _PortRate:
    recording: Recording
    where: str
    kind: str
    rate_gbit_per_s: float


@check(
    "port-rate",
    "every RDMA port runs at the full rate of its type",
    needs=lambda examined: has_rdma(examined) or has_npu_ports(examined),
)
def port_rate(examined: Examined) -> Iterator[Finding]:
    """Compare ports with others of their type and with its capability, and adapters with slots."""
    port_rates = [port for machine in examined.machines for port in _port_rates(examined, machine)]
    fastest: dict[str, float] = {}
    for port in port_rates:
        fastest[port.kind] = max(fastest.get(port.kind, 0.0), port.rate_gbit_per_s)
    for port in port_rates:
        capable = tables().adapters_gbit_per_s.get(port.kind, 0.0)
        if port.rate_gbit_per_s < fastest[port.kind]:
            yield failure(
                port.recording,
                port.where,
                what=f"the port runs at {port.rate_gbit_per_s:g} Gb/s, and others of its type"
                f" ({port.kind or 'unknown'}) at {fastest[port.kind]:g} Gb/s",
                why="collectives run at the rate of the slowest port",
                remedy="check the cable and the configured rate of the switch port; reset the link"
                " afterwards",
            )
        elif port.rate_gbit_per_s < capable:
            yield warning(
                port.recording,
                port.where,
                what=f"the port runs at {port.rate_gbit_per_s:g} Gb/s, and adapters of its type"
                f" ({port.kind}) support {capable:g} Gb/s",
                why="collectives between machines take longer than necessary",
                remedy="check the cable and the switch; nothing needs to be done if the switch, or"
                " this model of the adapter, supports no more",
            )
    for machine in examined.machines:
        yield from _slots(examined, machine)


def _port_rates(examined: Examined, machine: Recording) -> Iterator[_PortRate]:
    for port in chosen_ports(machine, value(examined, machine, "NCCL_IB_HCA")):
        if port.state == ACTIVE and port.rate_gbit_per_s is not None:
            yield _PortRate(
                recording=machine,
                where=f"{port.adapter} port {port.number}",
                kind=port.kind,
                rate_gbit_per_s=port.rate_gbit_per_s,
            )
    for npu in npu_ports(machine):
        if npu.link == "up" and npu.rate_gbit_per_s is not None:
            yield _PortRate(
                recording=machine,
                where=f"NPU {npu.number}",
                kind="NPU's own",
                rate_gbit_per_s=npu.rate_gbit_per_s,
            )


def _slots(examined: Examined, machine: Recording) -> Iterator[Finding]:
    """Find adapters in slots with too few lanes or of an old generation."""
    chosen = chosen_ports(machine, value(examined, machine, "NCCL_IB_HCA"))
    for adapter in sorted({port.adapter for port in chosen}):
        folder = f"{ROOT}/{adapter}/device"
        for attribute, template in (("link_speed", "at {}"), ("link_width", "with {} lanes")):
            current, maximum = (
                machine.text(f"{folder}/{prefix}_{attribute}") for prefix in ("current", "max")
            )
            if current and maximum and _number(current) < _number(maximum):
                yield failure(
                    machine,
                    f"{adapter}, its slot",
                    what=f"PCIe runs {template.format(current)}, and the adapter supports"
                    f" {template.format(maximum)}",
                    why="the slot, not the network, limits the adapter's rate",
                    remedy="reseat the adapter, or move it to a full-width slot; check the slot's"
                    " firmware settings",
                )


def _number(text: str) -> float:
    match = NUMBER.match(text)
    return float(match[0]) if match else 0.0
