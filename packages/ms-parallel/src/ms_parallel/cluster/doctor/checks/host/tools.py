"""Whether the tools that report on devices and ports answer."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.recording.recording import NO_ANSWER, Examined
from ms_parallel.cluster.doctor.registry import check

BROKEN = ("couldn't communicate with the NVIDIA driver", "Driver/library version mismatch")
"""What nvidia-smi says in place of a report."""


@check(
    "tools",
    "the tools of devices and ports answer",
    needs=lambda examined: any(machine.commands for machine in examined.machines),
)
def tools(examined: Examined) -> Iterator[Finding]:
    """Look for those that did not end, and for those that met no driver."""
    for machine in examined.machines:
        for line, text in machine.commands.items():
            broken = next((words for words in BROKEN if words in text), None)
            if text == NO_ANSWER:
                yield failure(
                    machine,
                    line,
                    what="it did not answer",
                    why="the driver hangs, and a process that opens the device will too",
                    remedy="look at the end of dmesg (Xid, NVRM, devdrv); reset the device or start"
                    " the machine again",
                )
            elif broken is not None:
                yield failure(
                    machine,
                    line,
                    what=f"it says: {broken}",
                    why="no process finds a device",
                    remedy="load the driver's module, or start the machine again after an update of"
                    " the driver",
                )
