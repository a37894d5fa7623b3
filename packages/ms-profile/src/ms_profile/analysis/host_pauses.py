"""Garbage collections and data waits from the recorder's ring, which traces do not have."""

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
    """Pauses of one rank, (N, 2) ns of its wall clock."""

    garbage: Intervals
    data: Intervals


def read_pauses(
    folder: Path, rank: int, *, on_problem: Callable[[str], None] = logger.warning
) -> Pauses | None:
    """Read a rank's pauses from a run's folder; None without a readable ring of the rank.

    Args:
        folder: the run's folder.
        rank: rank whose ring is read.
        on_problem: called with a message if the ring exists but cannot be read.
    """
    path = ring_path(folder, rank)
    if not path.is_file():
        return None
    try:
        recording = read_ring(path)
    except FormatError as error:
        on_problem(f"{error}; garbage collections and data waits of rank {rank} are unknown")
        return None
    spans = recording.spans[recording.spans["end_ns"] > 0]  # without spans still open
    offset = recording.clock.offset_ns

    def intervals_of(span_kind: Kind) -> Intervals:
        selected = spans[spans["kind"] == span_kind]
        start = selected["start_ns"].astype(np.int64) + offset
        return union(start, selected["end_ns"].astype(np.int64) + offset)

    return Pauses(garbage=intervals_of(Kind.GARBAGE), data=intervals_of(Kind.DATA))
