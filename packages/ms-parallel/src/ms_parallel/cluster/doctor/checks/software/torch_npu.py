"""Whether torch, torch_npu, CANN and the Ascend driver were released for one another."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.readings.ascend import cann, has_ascend, npu_driver
from ms_parallel.cluster.doctor.readings.tables import tables
from ms_parallel.cluster.doctor.readings.version import release, version
from ms_parallel.cluster.doctor.recording.recording import Examined, Recording
from ms_parallel.cluster.doctor.registry import check


@check("torch-npu", "torch, torch_npu, CANN and the driver go together", needs=has_ascend)
def torch_npu(examined: Examined) -> Iterator[Finding]:
    """Look at each rank beside its machine."""
    for one in examined.ranks:
        machine = examined.machine_of(one.machine.rank)
        if npu_driver(machine) is None:
            continue
        if one.machine.packages:
            yield from _packages(one, cann(machine))
        yield from _driver(one, machine)


def _packages(one: Recording, toolkit: str | None) -> Iterator[Finding]:
    torch, extension = (one.machine.packages.get(name) for name in ("torch", "torch-npu"))
    if extension is None:
        yield failure(
            one,
            "torch_npu",
            what="there are Ascend devices and torch_npu is not installed",
            why="torch does not see them, and training takes the CPU",
            remedy=f"pip install torch-npu=={release(torch or '') or 'the version of torch'}",
        )
        return
    if torch is not None and release(torch) != release(extension):
        yield failure(
            one,
            "torch_npu",
            what=f"torch_npu {extension} is for torch {release(extension)}, and torch is {torch}",
            why="it does not load, or its operators misbehave",
            remedy=f"pip install torch=={release(extension)}, or a torch_npu of {release(torch)}",
        )
        return
    plain = extension.split("+")[0]
    rows = [row for row in tables().torch_npu if version(row.torch_npu) <= version(plain)]
    rows = [row for row in rows if row.torch == release(plain)]
    row = max(rows, key=lambda row: version(row.torch_npu), default=None)
    if row is None or toolkit is None:
        return
    if version(toolkit)[:2] != version(row.cann)[:2]:
        yield warning(
            one,
            "CANN",
            what=f"CANN is {toolkit}, and torch_npu {extension} was released with {row.cann}",
            why="operators may be missing or slower; only neighbouring releases are tried together",
            remedy=f"install CANN {row.cann}, or the torch_npu that was released with {toolkit}",
        )


def _driver(one: Recording, machine: Recording) -> Iterator[Finding]:
    found, toolkit = npu_driver(machine), cann(machine)
    if toolkit is None:
        yield failure(
            one,
            "CANN",
            what="CANN is not found in /usr/local/Ascend/ascend-toolkit/latest",
            why="torch_npu loads its operators and HCCL from there",
            remedy="install the CANN toolkit and kernels, or point ASCEND_HOME_PATH to them",
        )
        return
    rows = [row for row in tables().ascend_drivers if version(row.cann) <= version(toolkit)]
    row = max(rows, key=lambda row: version(row.cann), default=None)
    if row is not None and found is not None and version(found) < version(row.driver):
        yield failure(
            one,
            "driver",
            what=f"Ascend driver {found} is older than {row.driver}, the oldest for CANN {toolkit}",
            why="devices do not open, or operators fail while they run",
            remedy=f"install Ascend HDK {row.driver} or newer, driver and firmware, and restart",
        )
