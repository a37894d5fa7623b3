"""Check that all ranks run the same software."""

from collections import Counter
from collections.abc import Callable, Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import cann, npu_driver
from ms_parallel.cluster.doctor.readings.nvidia import driver
from ms_parallel.cluster.doctor.readings.version import release
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check

ON_ALL_RANKS: dict[str, Callable[[Recording], str | None]] = {
    "ms-parallel": lambda recording: recording.machine.packages.get("ms-parallel"),
}
PER_DEVICE_TYPE: dict[str, Callable[[Recording], str | None]] = {
    "torch": lambda recording: recording.machine.packages.get("torch"),
    "torch_npu": lambda recording: recording.machine.packages.get("torch-npu"),
    "CUDA of torch": lambda recording: recording.machine.torch_cuda,
    "NCCL": lambda recording: recording.machine.libraries.get("nccl"),
}
PER_MACHINE: dict[str, Callable[[Recording], str | None]] = {
    "NVIDIA driver": driver,
    "Ascend driver": npu_driver,
    "CANN": cann,
}
ACROSS_DEVICE_TYPES: dict[str, Callable[[Recording], str | None]] = {
    "torch": lambda recording: release(recording.machine.packages.get("torch") or "") or None,
}
MAY_DIFFER: dict[str, Callable[[Recording], str | None]] = {
    "Python": lambda recording: recording.machine.python or None,
    "triton": lambda recording: recording.machine.packages.get("triton"),
    "ms-data": lambda recording: recording.machine.packages.get("ms-data"),
}


@check(
    "same-versions",
    "all ranks run the same versions",
    needs=lambda examined: len(examined.ranks) > 1,
)
def same_versions(examined: Examined) -> Iterator[Finding]:
    """Report ranks that differ from the majority; builds are compared per type of device."""
    ranks = [recording for recording in examined.ranks if recording.machine.packages]
    for name, read in {**ON_ALL_RANKS, **MAY_DIFFER}.items():
        yield from _differing(name, read, ranks)
    device_types = sorted({recording.machine.device for recording in ranks})
    for name, read in ACROSS_DEVICE_TYPES.items() if len(device_types) > 1 else ():
        yield from _differing(name, read, ranks)
    for device_type in device_types:
        same_type = [recording for recording in ranks if recording.machine.device == device_type]
        for name, read in PER_DEVICE_TYPE.items():
            yield from _differing(name, read, same_type)
        machines = [
            recording for recording in examined.machines if recording.machine.device == device_type
        ]
        for name, read in PER_MACHINE.items():
            yield from _differing(name, read, machines)


def _differing(
    name: str, read: Callable[[Recording], str | None], recordings: list[Recording]
) -> Iterator[Finding]:
    versions = [read(recording) for recording in recordings]
    if len(set(versions)) < 2:
        return
    majority = Counter(versions).most_common(1)[0][0]
    report = warning if name in MAY_DIFFER else failure
    for recording, installed in zip(recordings, versions, strict=True):
        if installed != majority:
            yield report(
                recording,
                name,
                what=f"{name} is {installed or 'absent'} here and {majority or 'absent'} on most"
                " other ranks",
                why="ranks with different versions may wait in different collectives, or compute"
                " different results",
                remedy=f"install {name} {majority} here"
                if majority
                else f"remove {name} here, or install it on all",
            )
