"""Whether what a run imports is installed."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check


@check(
    "packages",
    "torch is distributed, ms-data and torchrun are there",
    needs=lambda examined: any(one.machine.packages for one in examined.ranks),
)
def packages(examined: Examined) -> Iterator[Finding]:
    """Look at each rank, whose environments may differ."""
    for one in examined.ranks:
        machine = one.machine
        if not machine.packages:
            continue
        if not machine.backends:
            yield failure(
                one,
                "torch",
                what="torch has no backend for messages between processes",
                why="every layout of more than one process needs one",
                remedy="install a build of torch with distributed support: pip install torch",
            )
        if machine.packages.get("ms-data") is None:
            yield warning(
                one,
                "ms-data",
                what="ms-data is not installed",
                why="`train` reads its dataset with it",
                remedy="pip install 'ms-parallel[data]'",
            )
        if machine.torchrun is None:
            yield warning(
                one,
                "torchrun",
                what="torchrun is not on PATH",
                why="it starts the processes of a run",
                remedy="type python -m torch.distributed.run in its place, or add its folder to"
                " PATH",
            )
