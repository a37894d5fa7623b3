"""Check that all ranks can write the same output folder, fast enough."""

from collections.abc import Iterator

from ms_parallel.cluster.doctor.finding import Finding, failure, warning
from ms_parallel.cluster.doctor.recording.recording import Examined, Folder, Recording
from ms_parallel.cluster.doctor.registry import check

FAILS_MB_PER_S, WARNS_MB_PER_S = 20.0, 100.0
BYTES_PER_PARAMETER = 14
"""Bytes per parameter in a checkpoint: weights, a float32 copy and Adam's two moments."""
EXAMPLE_PARAMETERS = 7e9


@check(
    "output-folder",
    "all ranks see the folder of the run and write it fast enough",
    needs=lambda examined: bool(examined.measured.folders),
)
def output_folder(examined: Examined) -> Iterator[Finding]:
    """Check the measurements of each rank."""
    for folder in examined.measured.folders:
        recording = examined.rank(folder.rank)
        yield from _findings(recording, folder)


def _findings(recording: Recording, folder: Folder) -> Iterator[Finding]:
    if folder.problem:
        yield failure(
            recording,
            folder.path,
            what=f"it cannot be written: {folder.problem}",
            why="checkpoints and logs go there",
            remedy="use another --output-dir, or create it for this user on this machine",
        )
    if folder.shared is False:
        yield failure(
            recording,
            folder.path,
            what="this rank does not see what rank 0 has written there",
            why="each rank writes its part of a checkpoint; with separate folders no machine has a"
            " complete one",
            remedy="mount the same network folder on all machines, under the same path",
        )
    rate = folder.write_mb_per_s
    if rate is None or rate >= WARNS_MB_PER_S:
        return
    report = failure if rate < FAILS_MB_PER_S else warning
    minutes = EXAMPLE_PARAMETERS * BYTES_PER_PARAMETER / (rate * 1e6) / 60
    yield report(
        recording,
        folder.path,
        what=f"one process writes {rate:.0f} MB/s there",
        why=f"a checkpoint of 7 billion parameters with Adam takes one process {minutes:.0f}"
        " minutes",
        remedy="use a local disk or a parallel file system, and check for other writers",
    )
