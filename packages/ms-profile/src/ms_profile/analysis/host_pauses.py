"""What the recorder adds to a trace: garbage collection and waits for data."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from attrs import frozen

from ms_profile.errors import FormatError
from ms_profile.log.manifest import ring_path
from ms_profile.log.ring import Kind, read_ring
from ms_profile.trace.intervals import Intervals, union

logger = logging.getLogger(__name__)


@frozen(kw_only=True, eq=False)
class Pauses:
    """Intervals (N, 2) in ns of the rank's wall clock."""

    garbage: Intervals
    data: Intervals


def read_pauses(
    folder: Path, rank: int, *, on_problem: Callable[[str], None] = logger.warning
) -> Pauses | None:
    """Read a rank's pauses from a run's folder; None where it has no readable ring of the rank.

    Args:
        folder: of the run.
        rank: whose ring is read.
        on_problem: called with a sentence on a ring that is there and cannot be read.
    """
    path = ring_path(folder, rank)
    if not path.is_file():
        return None
    try:
        recording = read_ring(path)
    except FormatError as error:
        on_problem(f"{error}; garbage collection and waits for data of rank {rank} are not known")
        return None
    spans = recording.spans[recording.spans["end_ns"] > 0]
    offset = recording.clock.offset_ns

    def of(kind: Kind) -> Intervals:
        chosen = spans[spans["kind"] == kind]
        start = chosen["start_ns"].astype(np.int64) + offset
        return union(start, chosen["end_ns"].astype(np.int64) + offset)

    return Pauses(garbage=of(Kind.GARBAGE), data=of(Kind.DATA))
