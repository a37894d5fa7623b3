"""Check that the clocks of all machines agree."""

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
    """Check each rank's clock offset, minus the uncertainty of its estimate."""
    for clock in examined.measured.clocks:
        excess = abs(clock.offset_s) - clock.uncertainty_s
        if excess < WARNS_S:
            continue
        recording = examined.rank(clock.rank)
        report = failure if excess >= FAILS_S else warning
        side = "ahead of" if clock.offset_s > 0 else "behind"
        yield report(
            recording,
            "clock",
            what=f"it is {abs(clock.offset_s):.3g} s {side} that of rank 0 (to within"
            f" {clock.uncertainty_s * 1e3:.2g} ms)",
            why="logs and traces of the ranks do not line up, files on a network folder seem to"
            " come from the future, and certificates fail",
            remedy="start chronyd or systemd-timesyncd with the same server on all machines, and"
            " check with chronyc tracking",
        )
