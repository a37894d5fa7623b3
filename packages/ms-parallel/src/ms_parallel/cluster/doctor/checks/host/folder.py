"""Whether the folder of a run can be written, is fast enough, and is the same for all ranks."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.recording.recording import Examined, Folder, Recording
from ms_parallel.cluster.doctor.registry import check

FAILS_MB_PER_S, WARNS_MB_PER_S = 20.0, 100.0
BYTES_A_PARAMETER = 14
"""Bytes in a checkpoint: weights, a float32 copy and the two moments of Adam."""
EXAMPLE = 7e9


@check(
    "output-folder",
    "all ranks see the folder of the run and write it fast enough",
    needs=lambda examined: bool(examined.measured.folders),
)
def output_folder(examined: Examined) -> Iterator[Finding]:
    """Look at what each rank found there."""
    for folder in examined.measured.folders:
        at = examined.rank(folder.rank)
        yield from _found(at, folder)


def _found(at: Recording, folder: Folder) -> Iterator[Finding]:
    if folder.problem:
        yield failure(
            at,
            folder.path,
            what=f"it cannot be written: {folder.problem}",
            why="checkpoints and logs go there",
            remedy="give another with --output-dir, or have it made for this user on this machine",
        )
    if folder.shared is False:
        yield failure(
            at,
            folder.path,
            what="this rank does not see there what rank 0 has written",
            why="each rank writes its part of a checkpoint; on folders of their own no machine has"
            " a whole one",
            remedy="mount the same network folder on all machines, by the same path",
        )
    rate = folder.write_mb_per_s
    if rate is None or rate >= WARNS_MB_PER_S:
        return
    say = failure if rate < FAILS_MB_PER_S else warning
    minutes = EXAMPLE * BYTES_A_PARAMETER / (rate * 1e6) / 60
    yield say(
        at,
        folder.path,
        what=f"one process writes {rate:.0f} MB/s there",
        why=f"a checkpoint of 7 billion parameters with Adam takes one process {minutes:.0f}"
        " minutes",
        remedy="choose a local disk or a parallel file system, and look at what else writes there",
    )
