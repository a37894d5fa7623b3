"""Check that the tools of devices and ports respond."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.recording.recording import NO_ANSWER, Examined
from ms_parallel.cluster.doctor.registry import check

BROKEN = ("couldn't communicate with the NVIDIA driver", "Driver/library version mismatch")
"""Messages of nvidia-smi instead of a report."""


@check(
    "tools",
    "the tools of devices and ports respond",
    needs=lambda examined: any(machine.commands for machine in examined.machines),
)
def tools(examined: Examined) -> Iterator[Finding]:
    """Check for tools that hung, and for those without a working driver."""
    for machine in examined.machines:
        for line, text in machine.commands.items():
            broken = next((words for words in BROKEN if words in text), None)
            if text == NO_ANSWER:
                yield failure(
                    machine,
                    line,
                    what="it did not respond",
                    why="the driver hangs, and so will a process that opens the device",
                    remedy="check the end of dmesg (Xid, NVRM, devdrv); reset the device or reboot"
                    " the machine",
                )
            elif broken is not None:
                yield failure(
                    machine,
                    line,
                    what=f"it says: {broken}",
                    why="no process finds a device",
                    remedy="load the driver's kernel module, or reboot after a driver update",
                )
