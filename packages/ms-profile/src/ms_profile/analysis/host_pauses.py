"""What the recorder adds to a trace: garbage collection and waits for data."""

from pathlib import Path

import numpy as np
from attrs import frozen

from ms_profile.errors import FormatError
from ms_profile.log.manifest import ring_path
from ms_profile.log.ring import Kind, read_ring
from ms_profile.trace.intervals import Intervals, union


@frozen(kw_only=True, eq=False)
class Pauses:
    """Intervals (N, 2) in ns of the rank's wall clock."""

    garbage: Intervals
    data: Intervals


def read_pauses(folder: Path, rank: int) -> Pauses | None:
    """Read a rank's pauses from a run's folder; None where it has no readable ring of the rank."""
    path = ring_path(folder, rank)
    if not path.is_file():
        return None
    try:
        recording = read_ring(path)
    except FormatError:
        return None
    spans = recording.spans[recording.spans["end_ns"] > 0]
    offset = recording.clock.offset_ns

    def of(kind: Kind) -> Intervals:
        chosen = spans[spans["kind"] == kind]
        start = chosen["start_ns"].astype(np.int64) + offset
        return union(start, chosen["end_ns"].astype(np.int64) + offset)

    return Pauses(garbage=of(Kind.GARBAGE), data=of(Kind.DATA))
