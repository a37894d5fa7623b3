"""Check that packages of a run are installed."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check


@check(
    "packages",
    "torch is built with distributed support, ms-data and torchrun are installed",
    needs=lambda examined: any(one.machine.packages for one in examined.ranks),
)
def packages(examined: Examined) -> Iterator[Finding]:
    """Check each rank, as environments may differ."""
    for recording in examined.ranks:
        machine = recording.machine
        if not machine.packages:
            continue
        if not machine.backends:
            yield failure(
                recording,
                "torch",
                what="torch has no backend for messages between processes",
                why="every layout with more than one process needs one",
                remedy="install a build of torch with distributed support: pip install torch",
            )
        if machine.packages.get("ms-data") is None:
            yield warning(
                recording,
                "ms-data",
                what="ms-data is not installed",
                why="`train` reads datasets with it",
                remedy="pip install 'ms-parallel[data]'",
            )
        if machine.torchrun is None:
            yield warning(
                recording,
                "torchrun",
                what="torchrun is not on PATH",
                why="it starts the processes of a run",
                remedy="use python -m torch.distributed.run instead, or add its folder to PATH",
            )
