"""Check that variables of the collectives are the same on all ranks."""

from collections import Counter
from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure
from ms_parallel.cluster.doctor.readings.variables import value
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check

SHARED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "HCCL_ALGO", "HCCL_BUFFSIZE")
"""Variables that both ends of a message must agree on."""


@check(
    "same-variables",
    "algorithm, protocol and buffer size of collectives are the same on all ranks",
    needs=lambda examined: len(examined.ranks) > 1,
)
def same_variables(examined: Examined) -> Iterator[Finding]:
    """Report ranks that differ from the majority."""
    for name in SHARED:
        values = [value(examined, recording, name) for recording in examined.ranks]
        majority = Counter(values).most_common(1)[0][0]
        for recording, setting in zip(examined.ranks, values, strict=True):
            if setting != majority:
                yield failure(
                    recording,
                    name,
                    what=f"{name} is {setting or 'not set'} here and {majority or 'not set'} on"
                    " most other ranks",
                    why="ranks send in one way and expect another: the run hangs",
                    remedy=f"set {name}={majority} on all" if majority else f"unset {name}",
                )
