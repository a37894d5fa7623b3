"""Whether all ranks run the same software."""

from collections import Counter
from collections.abc import Callable, Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import cann, npu_driver
from ms_parallel.cluster.doctor.readings.nvidia import driver
from ms_parallel.cluster.doctor.readings.version import release
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

OF_ALL: dict[str, Callable[[Recording], str | None]] = {
    "ms-parallel": lambda one: one.machine.packages.get("ms-parallel"),
}
OF_A_KIND: dict[str, Callable[[Recording], str | None]] = {
    "torch": lambda one: one.machine.packages.get("torch"),
    "torch_npu": lambda one: one.machine.packages.get("torch-npu"),
    "CUDA of torch": lambda one: one.machine.torch_cuda,
    "NCCL": lambda one: one.machine.libraries.get("nccl"),
}
OF_A_MACHINE: dict[str, Callable[[Recording], str | None]] = {
    "NVIDIA driver": driver,
    "Ascend driver": npu_driver,
    "CANN": cann,
}
BETWEEN_KINDS: dict[str, Callable[[Recording], str | None]] = {
    "torch": lambda one: release(one.machine.packages.get("torch") or "") or None,
}
MAY_DIFFER: dict[str, Callable[[Recording], str | None]] = {
    "Python": lambda one: one.machine.python or None,
    "triton": lambda one: one.machine.packages.get("triton"),
    "ms-data": lambda one: one.machine.packages.get("ms-data"),
}


@check(
    "same-versions",
    "all ranks run the same versions",
    needs=lambda examined: len(examined.ranks) > 1,
)
def same_versions(examined: Examined) -> Iterator[Finding]:
    """Name the ranks that differ from most others; builds are those of one kind of device."""
    ranks = [one for one in examined.ranks if one.machine.packages]
    for name, read in {**OF_ALL, **MAY_DIFFER}.items():
        yield from _differing(name, read, ranks)
    kinds = sorted({one.machine.device for one in ranks})
    for name, read in BETWEEN_KINDS.items() if len(kinds) > 1 else ():
        yield from _differing(name, read, ranks)
    for kind in kinds:
        alike = [one for one in ranks if one.machine.device == kind]
        for name, read in OF_A_KIND.items():
            yield from _differing(name, read, alike)
        machines = [one for one in examined.machines if one.machine.device == kind]
        for name, read in OF_A_MACHINE.items():
            yield from _differing(name, read, machines)


def _differing(
    name: str, read: Callable[[Recording], str | None], among: list[Recording]
) -> Iterator[Finding]:
    versions = [read(one) for one in among]
    if len(set(versions)) < 2:
        return
    most = Counter(versions).most_common(1)[0][0]
    say = warning if name in MAY_DIFFER else failure
    for one, found in zip(among, versions, strict=True):
        if found != most:
            yield say(
                one,
                name,
                what=f"{name} is {found or 'absent'} here and {most or 'absent'} on most others",
                why="ranks of different versions wait for one another in different collectives, or"
                " compute different numbers",
                remedy=f"install {name} {most} here"
                if most
                else f"remove {name} here, or install it on all",
            )
