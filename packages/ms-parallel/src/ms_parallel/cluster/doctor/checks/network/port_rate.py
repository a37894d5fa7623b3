"""Whether ports send at the rate that they can."""

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
class _Rated:
    at: Recording
    where: str
    kind: str
    rate_gbit_per_s: float


@check(
    "port-rate",
    "every RDMA port sends at the rate of its kind",
    needs=lambda examined: has_rdma(examined) or has_npu_ports(examined),
)
def port_rate(examined: Examined) -> Iterator[Finding]:
    """Compare ports with others of their kind, with what the kind can, and adapters with slots."""
    rated = [one for machine in examined.machines for one in _rated(examined, machine)]
    fastest: dict[str, float] = {}
    for one in rated:
        fastest[one.kind] = max(fastest.get(one.kind, 0.0), one.rate_gbit_per_s)
    for one in rated:
        capable = tables().adapters_gbit_per_s.get(one.kind, 0.0)
        if one.rate_gbit_per_s < fastest[one.kind]:
            yield failure(
                one.at,
                one.where,
                what=f"the port runs at {one.rate_gbit_per_s:g} Gb/s, and others of its kind"
                f" ({one.kind or 'unknown'}) at {fastest[one.kind]:g} Gb/s",
                why="collectives go at the rate of the slowest port",
                remedy="look at the cable and at the rate that the switch's port is set to; reset"
                " the link afterwards",
            )
        elif one.rate_gbit_per_s < capable:
            yield warning(
                one.at,
                one.where,
                what=f"the port runs at {one.rate_gbit_per_s:g} Gb/s, and adapters of its kind"
                f" ({one.kind}) can do {capable:g} Gb/s",
                why="collectives between machines take longer than they need to",
                remedy="look at the cable and the switch; nothing is to be done where the switch,"
                " or this model of the adapter, gives no more",
            )
    for machine in examined.machines:
        yield from _slots(examined, machine)


def _rated(examined: Examined, machine: Recording) -> Iterator[_Rated]:
    for port in chosen_ports(machine, value(examined, machine, "NCCL_IB_HCA")):
        if port.state == ACTIVE and port.rate_gbit_per_s is not None:
            yield _Rated(
                at=machine,
                where=f"{port.adapter} port {port.number}",
                kind=port.kind,
                rate_gbit_per_s=port.rate_gbit_per_s,
            )
    for npu in npu_ports(machine):
        if npu.link == "up" and npu.rate_gbit_per_s is not None:
            yield _Rated(
                at=machine,
                where=f"NPU {npu.number}",
                kind="NPU's own",
                rate_gbit_per_s=npu.rate_gbit_per_s,
            )


def _slots(examined: Examined, machine: Recording) -> Iterator[Finding]:
    """Find the adapters that a slot of too few lanes, or of an old generation, holds back."""
    chosen = chosen_ports(machine, value(examined, machine, "NCCL_IB_HCA"))
    for adapter in sorted({port.adapter for port in chosen}):
        folder = f"{ROOT}/{adapter}/device"
        for what, said in (("link_speed", "at {}"), ("link_width", "with {} lanes")):
            now, most = (machine.text(f"{folder}/{word}_{what}") for word in ("current", "max"))
            if now and most and _number(now) < _number(most):
                yield failure(
                    machine,
                    f"{adapter}, its slot",
                    what=f"PCIe runs {said.format(now)}, and the adapter can do"
                    f" {said.format(most)}",
                    why="the slot, not the network, limits how fast the adapter sends",
                    remedy="seat the adapter again, or move it to a slot of full width; look at the"
                    " firmware's settings of the slot",
                )


def _number(text: str) -> float:
    found = NUMBER.match(text)
    return float(found[0]) if found else 0.0
