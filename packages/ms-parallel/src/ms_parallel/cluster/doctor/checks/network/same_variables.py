"""Whether variables that all ranks must share are the same on all."""

from collections import Counter
from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.readings.variables import value
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check

SHARED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "HCCL_ALGO", "HCCL_BUFFSIZE")
"""What both ends of a message go by."""


@check(
    "same-variables",
    "algorithm, protocol and buffers of collectives are the same on all ranks",
    needs=lambda examined: len(examined.ranks) > 1,
)
def same_variables(examined: Examined) -> Iterator[Finding]:
    """Name the ranks that differ from most others."""
    for name in SHARED:
        values = [value(examined, one, name) for one in examined.ranks]
        most = Counter(values).most_common(1)[0][0]
        for one, found in zip(examined.ranks, values, strict=True):
            if found != most:
                yield failure(
                    one,
                    name,
                    what=f"{name} is {found or 'not set'} here and {most or 'not set'} on most"
                    " others",
                    why="ranks send in one way and wait for another: the run hangs",
                    remedy=f"set {name}={most} on all" if most else f"unset {name}",
                )
