"""Align the clocks of the ranks' traces."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import structs

from ms_profile.analysis.collectives import MatchedCollective
from ms_profile.clocks.alignment import SYNCHRONIZING, ClockFit, align_clocks
from ms_profile.errors import ClockError

Times = dict[int, dict[Hashable, int]]
CAUSALITY_NS: Final = 200_000
"""Largest difference between two processes' readings of one host's clock, with a margin."""


def align_collectives(
    matched: Sequence[MatchedCollective], hosts: Mapping[int, str]
) -> dict[int, ClockFit]:
    """Align the ranks' clocks by the ends of their common collectives.

    Ranks on the same host as the lowest rank share its clock, unless the collectives contradict
    that. The result omits ranks that have no collectives in common with the lowest rank.

    Args:
        matched: collectives with each rank's times on its own clock.
        hosts: host name of every rank; empty if unknown.
    """
    ends: Times = {rank: {} for rank in hosts}
    starts: Times = {rank: {} for rank in hosts}
    for collective in matched:
        if collective.kind in SYNCHRONIZING:
            for rank in collective.ends_ns:
                ends[rank][collective.key] = collective.ends_ns[rank]
                starts[rank][collective.key] = collective.starts_ns[rank]
    try:
        fits = align_clocks(ends, starts)
    except ClockError:
        return {}
    base = min(hosts)
    for rank, fit in fits.items():
        same_host = rank != base and hosts[base] and hosts[rank] == hosts[base]
        if same_host and _causal(ends, starts, base, rank):
            fits[rank] = structs.replace(fit, offset_ns=0.0, drift=0.0, error_ns=0.0, bound_ns=0.0)
    return fits


def _causal(ends: Times, starts: Times, first: int, second: int) -> bool:
    """Return whether, on equal clocks, no rank starts a collective after it ended on another."""
    shared = ends[first].keys() & ends[second].keys()
    return all(
        ends[first][key] + CAUSALITY_NS > starts[second][key]
        and ends[second][key] + CAUSALITY_NS > starts[first][key]
        for key in shared
    )


def shift_collective(
    collective: MatchedCollective, fits: Mapping[int, ClockFit]
) -> MatchedCollective:
    """Convert a collective's times to the reference clock; ranks without a fit are dropped."""

    def corrected(times_ns: Mapping[int, int]) -> dict[int, int]:
        return {
            rank: int(fits[rank].correct(np.array([time_ns]))[0])
            for rank, time_ns in times_ns.items()
            if rank in fits
        }

    return MatchedCollective(
        key=collective.key, kind=collective.kind, group=collective.group,
        size_bytes=collective.size_bytes,
        starts_ns=corrected(collective.starts_ns), ends_ns=corrected(collective.ends_ns),
        rows={rank: row for rank, row in collective.rows.items() if rank in fits},
    )  # fmt: skip
