"""Check that devices are healthy."""

from collections import Counter
from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import has_ascend, npus
from ms_parallel.cluster.doctor.readings.number import parse_int
from ms_parallel.cluster.doctor.readings.nvidia import Gpu, gpus, has_nvidia
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

SLOWDOWN_FACTS = (
    "Clocks Event Reasons / HW Slowdown",
    "Clocks Throttle Reasons / HW Slowdown",
)


@check(
    "devices",
    "devices are healthy, and the same on all machines",
    needs=lambda examined: has_nvidia(examined) or has_ascend(examined),
)
def devices(examined: Examined) -> Iterator[Finding]:
    """Check the reports of the vendors' tools."""
    for machine in examined.machines:
        for gpu in gpus(machine):
            yield from _gpu(machine, gpu)
        for npu in npus(machine):
            if npu.health.upper() != "OK":
                yield failure(
                    machine,
                    f"NPU {npu.number}",
                    what=f"its health is {npu.health}",
                    why="operators fail or give wrong results",
                    remedy=f"npu-smi info -t health -i {npu.number} shows the fault; reset the"
                    " device or have it replaced",
                )
    yield from _differing(list(examined.machines))


def _gpu(machine: Recording, gpu: Gpu) -> Iterator[Finding]:
    current, maximum = (gpu.fact(f"Link Width / {what}") for what in ("Current", "Max"))
    if 0 < _lanes(current) < _lanes(maximum):
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what=f"its PCIe link has {_lanes(current)} of {_lanes(maximum)} lanes",
            why="copies from and to host memory, and messages between machines, are slower",
            remedy="reseat the device; check the slot's firmware settings",
        )
    if gpu.fact(*SLOWDOWN_FACTS) == "Active":
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what="the hardware throttles its clock",
            why="every rank waits for this one",
            remedy="check its temperature and power (nvidia-smi -q -d PERFORMANCE,TEMPERATURE),"
            " the fans and the power supply",
        )
    if gpu.fact("Remapped Rows / Pending", "Retired Pages / Pending Page Blacklist") == "Yes":
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what="memory rows are waiting to be remapped",
            why="an uncorrectable error ends the process that reads such a row",
            remedy="stop all processes on it and reset it: nvidia-smi --gpu-reset -i NUMBER",
        )


def _lanes(text: str) -> int:
    return parse_int(text.rstrip("x")) or 0


def _differing(machines: list[Recording]) -> Iterator[Finding]:
    counts = [_device_counts(machine) for machine in machines]
    if len(set(counts)) < 2:
        return
    majority = Counter(counts).most_common(1)[0][0]
    for machine, count in zip(machines, counts, strict=True):
        if count != majority:
            yield warning(
                machine,
                "devices",
                what=f"it has {count or 'none'}, and most machines have {majority or 'none'}",
                why="with equal shares, fast devices wait for slow ones",
                remedy="leave the machine out, or look for a device that has fallen off the bus",
            )


def _device_counts(machine: Recording) -> str:
    names = Counter([gpu.name for gpu in gpus(machine)] + [npu.name for npu in npus(machine)])
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
