"""Ranks' traces on one clock."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np
from msgspec import structs

from ms_profile.analysis.collectives import MatchedCollective
from ms_profile.clocks.alignment import SYNCHRONISING, ClockFit, align_clocks
from ms_profile.errors import ClockError

Instants = dict[int, dict[Hashable, int]]
CAUSALITY_NS: Final = 200_000
"""How far two processes' readings of one host's clock may differ, with room."""


def align_collectives(
    matched: Sequence[MatchedCollective], hosts: Mapping[int, str]
) -> dict[int, ClockFit]:
    """Align ranks' clocks by the ends of the collectives that they shared.

    Args:
        matched: each rank's instants on its own clock.
        hosts: of every rank; empty where not known.

    Ranks on the lowest one's host share its clock, unless the collectives prove otherwise. Ranks
    that share no collectives with the lowest one are left out of the result.
    """
    ends: Instants = {rank: {} for rank in hosts}
    starts: Instants = {rank: {} for rank in hosts}
    for one in matched:
        if one.kind in SYNCHRONISING:
            for rank in one.ends_ns:
                ends[rank][one.key] = one.ends_ns[rank]
                starts[rank][one.key] = one.starts_ns[rank]
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
    """Return whether, by equal clocks, no collective ends on a rank before it begins on another."""
    shared = ends[left].keys() & ends[right].keys()
    return all(
        ends[left][key] + CAUSALITY_NS > starts[right][key]
        and ends[right][key] + CAUSALITY_NS > starts[left][key]
        for key in shared
    )


def shift_collective(one: MatchedCollective, fits: Mapping[int, ClockFit]) -> MatchedCollective:
    """Put a collective on the reference's clock; ranks without a fit are left out."""

    def corrected(instants: Mapping[int, int]) -> dict[int, int]:
        return {
            rank: int(fits[rank].correct(np.array([instant]))[0])
            for rank, instant in instants.items()
            if rank in fits
        }

    return MatchedCollective(
        key=one.key, kind=one.kind, group=one.group, size_bytes=one.size_bytes,
        starts_ns=corrected(one.starts_ns), ends_ns=corrected(one.ends_ns),
        rows={rank: row for rank, row in one.rows.items() if rank in fits},
    )  # fmt: skip
