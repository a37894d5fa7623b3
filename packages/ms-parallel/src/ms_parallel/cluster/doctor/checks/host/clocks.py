"""Whether the clocks of all machines agree."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.recording.recording import Examined
from ms_parallel.cluster.doctor.registry import check

FAILS_S, WARNS_S = 0.5, 0.05


@check(
    "clocks",
    "the clocks of all machines agree",
    needs=lambda examined: len(examined.measured.clocks) > 1,
)
def clocks(examined: Examined) -> Iterator[Finding]:
    """Look at each rank's offset, less what the estimate may be wrong by."""
    for clock in examined.measured.clocks:
        beyond = abs(clock.offset_s) - clock.uncertainty_s
        if beyond < WARNS_S:
            continue
        at = examined.rank(clock.rank)
        say = failure if beyond >= FAILS_S else warning
        side = "ahead of" if clock.offset_s > 0 else "behind"
        yield say(
            at,
            "clock",
            what=f"it is {abs(clock.offset_s):.3g} s {side} that of rank 0 (to within"
            f" {clock.uncertainty_s * 1e3:.2g} ms)",
            why="logs and traces of the ranks do not line up, a network folder's files seem to come"
            " from the future, and certificates fail",
            remedy="start chronyd or systemd-timesyncd with the same server on all machines, and"
            " look with chronyc tracking",
        )
