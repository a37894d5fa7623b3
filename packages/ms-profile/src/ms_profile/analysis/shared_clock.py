"""Ranks' traces on one clock."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ms_profile.analysis.collectives import Meeting
from ms_profile.clocks.alignment import SYNCHRONISING, ClockFit, align_clocks
from ms_profile.errors import ClockError

__all__ = ["align_meetings", "correct_intervals", "shift_meeting"]

Instants = dict[int, dict[Hashable, int]]
CAUSALITY_NS: Final = 200_000
"""How far two processes' readings of one host's clock may differ, with room."""


def align_meetings(meetings: Sequence[Meeting], hosts: Mapping[int, str]) -> dict[int, ClockFit]:
    """Align ranks' clocks by the ends of the collectives that they shared.

    Args:
        meetings: each rank's instants on its own clock.
        hosts: of every rank; empty where not known.

    Ranks on the lowest one's host share its clock, unless the collectives prove otherwise. Ranks
    that share no collectives with the lowest one are left out of the result.
    """
    ends: Instants = {rank: {} for rank in hosts}
    starts: Instants = {rank: {} for rank in hosts}
    for meeting in meetings:
        if meeting.kind in SYNCHRONISING:
            for rank in meeting.ends_ns:
                ends[rank][meeting.key] = meeting.ends_ns[rank]
                starts[rank][meeting.key] = meeting.starts_ns[rank]
    try:
        fits = align_clocks(ends, starts)
    except ClockError:
        return {}
    base = min(hosts)
    for rank, fit in fits.items():
        same = rank != base and hosts[base] and hosts[rank] == hosts[base]
        if same and _causal(ends, starts, base, rank):
            fits[rank] = structs.replace(fit, offset_ns=0.0, drift=0.0, error_ns=0.0, bound_ns=0.0)
    return fits


def _causal(ends: Instants, starts: Instants, left: int, right: int) -> bool:
    """Whether no collective ends on one rank before it begins on the other, were clocks equal."""
    shared = ends[left].keys() & ends[right].keys()
    return all(
        ends[left][key] + CAUSALITY_NS > starts[right][key]
        and ends[right][key] + CAUSALITY_NS > starts[left][key]
        for key in shared
    )


def shift_meeting(meeting: Meeting, fits: Mapping[int, ClockFit]) -> Meeting:
    """Put a meeting on the reference's clock; ranks without a fit are left out."""

    def corrected(instants: Mapping[int, int]) -> dict[int, int]:
        return {
            rank: int(fits[rank].correct(np.array([instant]))[0])
            for rank, instant in instants.items()
            if rank in fits
        }

    return Meeting(
        key=meeting.key, kind=meeting.kind, group=meeting.group, size_bytes=meeting.size_bytes,
        starts_ns=corrected(meeting.starts_ns), ends_ns=corrected(meeting.ends_ns),
        rows={rank: row for rank, row in meeting.rows.items() if rank in fits},
    )  # fmt: skip


def correct_intervals(intervals: NDArray[np.int64], fit: ClockFit) -> NDArray[np.int64]:
    """Put (N, 2) intervals on the reference's clock."""
    return fit.correct(intervals.reshape(-1)).reshape(-1, 2)
