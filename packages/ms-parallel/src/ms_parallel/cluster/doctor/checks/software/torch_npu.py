"""Check that torch, torch_npu, CANN and the Ascend driver are compatible."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import cann, has_ascend, npu_driver
from ms_parallel.cluster.doctor.readings.tables import tables
from ms_parallel.cluster.doctor.readings.version import release, version
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check


@check("torch-npu", "torch, torch_npu, CANN and the driver are compatible", needs=has_ascend)
def torch_npu(examined: Examined) -> Iterator[Finding]:
    """Compare each rank's packages with its machine."""
    for recording in examined.ranks:
        machine = examined.machine_of(recording.machine.rank)
        if npu_driver(machine) is None:
            continue
        if recording.machine.packages:
            yield from _packages(recording, cann(machine))
        yield from _driver(recording, machine)


def _packages(recording: Recording, toolkit: str | None) -> Iterator[Finding]:
    torch, extension = (recording.machine.packages.get(name) for name in ("torch", "torch-npu"))
    if extension is None:
        yield failure(
            recording,
            "torch_npu",
            what="there are Ascend devices but torch_npu is not installed",
            why="torch does not find them, and training runs on the CPU",
            remedy=f"pip install torch-npu=={release(torch or '') or 'the version of torch'}",
        )
        return
    if torch is not None and release(torch) != release(extension):
        yield failure(
            recording,
            "torch_npu",
            what=f"torch_npu {extension} is for torch {release(extension)}, but torch is {torch}",
            why="it does not load, or its operators misbehave",
            remedy=f"pip install torch=={release(extension)}, or a torch_npu for {release(torch)}",
        )
        return
    base = extension.split("+")[0]
    rows = [row for row in tables().torch_npu if version(row.torch_npu) <= version(base)]
    rows = [row for row in rows if row.torch == release(base)]
    row = max(rows, key=lambda row: version(row.torch_npu), default=None)
    if row is None or toolkit is None:
        return
    if version(toolkit)[:2] != version(row.cann)[:2]:
        yield warning(
            recording,
            "CANN",
            what=f"CANN is {toolkit}, but torch_npu {extension} was released with {row.cann}",
            why="operators may be missing or slow; only adjacent releases are tested together",
            remedy=f"install CANN {row.cann}, or the torch_npu released with {toolkit}",
        )


def _driver(recording: Recording, machine: Recording) -> Iterator[Finding]:
    installed, toolkit = npu_driver(machine), cann(machine)
    if toolkit is None:
        yield failure(
            recording,
            "CANN",
            what="CANN is not found in /usr/local/Ascend/ascend-toolkit/latest",
            why="torch_npu loads its operators and HCCL from there",
            remedy="install the CANN toolkit and kernels, or point ASCEND_HOME_PATH to them",
        )
        return
    rows = [row for row in tables().ascend_drivers if version(row.cann) <= version(toolkit)]
    row = max(rows, key=lambda row: version(row.cann), default=None)
    if row is not None and installed is not None and version(installed) < version(row.driver):
        yield failure(
            recording,
            "driver",
            what=f"Ascend driver {installed} is older than {row.driver}, the oldest for CANN"
            f" {toolkit}",
            why="devices do not open, or operators fail at run time",
            remedy=f"install Ascend HDK {row.driver} or newer, driver and firmware, and restart",
        )
