"""Whether devices are well."""

from collections import Counter
from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import has_ascend, npus
from ms_parallel.cluster.doctor.readings.number import whole
from ms_parallel.cluster.doctor.readings.nvidia import Gpu, gpus, has_nvidia
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

SLOWED = (
    "Clocks Event Reasons / HW Slowdown",
    "Clocks Throttle Reasons / HW Slowdown",
)


@check(
    "devices",
    "devices are healthy, and the same on all machines",
    needs=lambda examined: has_nvidia(examined) or has_ascend(examined),
)
def devices(examined: Examined) -> Iterator[Finding]:
    """Read what the tools of the vendors say."""
    for machine in examined.machines:
        for gpu in gpus(machine):
            yield from _gpu(machine, gpu)
        for npu in npus(machine):
            if npu.health.upper() != "OK":
                yield failure(
                    machine,
                    f"NPU {npu.number}",
                    what=f"its health is {npu.health}",
                    why="operators fail or give wrong numbers",
                    remedy=f"npu-smi info -t health -i {npu.number} says which fault it is; reset"
                    " the device or have it exchanged",
                )
    yield from _mixed(list(examined.machines))


def _gpu(machine: Recording, gpu: Gpu) -> Iterator[Finding]:
    now, most = (gpu.fact(f"Link Width / {what}") for what in ("Current", "Max"))
    if 0 < _lanes(now) < _lanes(most):
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what=f"its PCIe link has {_lanes(now)} of {_lanes(most)} lanes",
            why="copies from and to host memory, and messages between machines, are slower",
            remedy="seat the device again; look at the slot's settings in the firmware",
        )
    if gpu.fact(*SLOWED) == "Active":
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what="the hardware holds its clock down",
            why="every rank waits for this one",
            remedy="look at its temperature and power (nvidia-smi -q -d PERFORMANCE,TEMPERATURE),"
            " at fans and at the power supply",
        )
    if gpu.fact("Remapped Rows / Pending", "Retired Pages / Pending Page Blacklist") == "Yes":
        yield failure(
            machine,
            f"GPU {gpu.bus}",
            what="rows of its memory are waiting to be replaced",
            why="uncorrectable errors end the process that meets them",
            remedy="end what runs on it and reset it: nvidia-smi --gpu-reset -i NUMBER",
        )


def _lanes(text: str) -> int:
    return whole(text.rstrip("x")) or 0


def _mixed(machines: list[Recording]) -> Iterator[Finding]:
    kinds = [_kinds(machine) for machine in machines]
    if len(set(kinds)) < 2:
        return
    most = Counter(kinds).most_common(1)[0][0]
    for machine, kind in zip(machines, kinds, strict=True):
        if kind != most:
            yield warning(
                machine,
                "devices",
                what=f"there are {kind or 'none'} here, and {most or 'none'} on most machines",
                why="equal shares make the fast ones wait for the slow ones",
                remedy="leave the machine out, or look for a device that has fallen off its bus",
            )


def _kinds(machine: Recording) -> str:
    names = Counter([gpu.name for gpu in gpus(machine)] + [npu.name for npu in npus(machine)])
    return ", ".join(f"{count} {name}" for name, count in sorted(names.items()))
