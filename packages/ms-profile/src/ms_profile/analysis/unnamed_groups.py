"""Separate process groups for backends that do not name them, such as gloo.

Two rows of a grid that each do an all-gather look like one all-gather of all ranks. But members of
one group see a synchronizing collective end at nearly the same time, and members of different
groups do not. First the clocks are aligned by the collectives whose ends agree best; on these
clocks, ranks whose collectives of a kind end together form its groups.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ms_profile.analysis.collectives import MatchedCollective
from ms_profile.analysis.shared_clock import align_collectives
from ms_profile.clocks.alignment import SYNCHRONIZING, ClockFit

MIN_SPREAD_NS: Final = 60_000.0  # ends within 60 µs count as simultaneous
MIN_DISTANCE_NS: Final = 20_000.0  # lower limit of the distance between two groups' ends
MAX_CELLS: Final = 4_000_000
MIN_COLLECTIVES: Final = 3


def split_groups(
    matched: Sequence[MatchedCollective], hosts: Mapping[int, str]
) -> tuple[MatchedCollective, ...]:
    """Split collectives of unnamed groups by the ranks that took part together.

    Args:
        matched: collectives as `ms_profile.analysis.collectives.match_collectives` matched them.
        hosts: host name of every rank; empty if unknown.
    """
    series: dict[Hashable, list[MatchedCollective]] = defaultdict(list)
    for collective in matched:
        series[
            collective.kind, collective.group, collective.size_bytes, tuple(collective.starts_ns)
        ].append(collective)
    # Two ranks are always one group, and only synchronizing collectives end together.
    candidates = {
        key
        for key, members in series.items()
        if not members[0].group
        and len(members[0].starts_ns) > 2
        and members[0].kind in SYNCHRONIZING
        and len(members) >= MIN_COLLECTIVES
    }
    if not candidates:
        return tuple(matched)
    # The merged collectives distort this fit, but real groups still agree best.
    rough = align_collectives(matched, hosts)
    spread = {key: _spread(members, rough) for key, members in series.items()}
    limit = max(2 * min(spread.values()), MIN_SPREAD_NS)
    trusted = [
        collective
        for key, members in series.items()
        if spread[key] <= limit
        for collective in members
    ]
    # Second fit, without the collectives that may be a mix of several groups.
    fits = align_collectives(trusted, hosts)
    closest = [_distances(members, fits) for key, members in series.items() if spread[key] <= limit]
    # Distance of the ends of ranks that are known to end together.
    usual = [float(np.median(table[table > 0])) for table in closest if (table > 0).any()]
    max_distance = max(3 * min(usual, default=0.0), MIN_DISTANCE_NS)
    split: list[MatchedCollective] = []
    for key, members in series.items():
        groups = _groups_by_end(members, fits, max_distance) if key in candidates else None
        split += (
            members
            if groups is None
            else [_part(collective, g) for collective in members for g in groups]
        )
    return tuple(split)


def _ends(
    members: Sequence[MatchedCollective], fits: Mapping[int, ClockFit]
) -> NDArray[np.float64] | None:
    """Return end times on one clock, (K collectives, R ranks) ns; None if a clock is unknown."""
    ranks = list(members[0].ends_ns)
    if any(rank not in fits for rank in ranks):
        return None
    columns = [
        fits[rank].correct(np.array([member.ends_ns[rank] for member in members])) for rank in ranks
    ]
    table = np.stack(columns, axis=1)
    since_first: NDArray[np.float64] = (table - table.min()).astype(np.float64)
    return since_first


def _spread(members: Sequence[MatchedCollective], fits: Mapping[int, ClockFit]) -> float:
    """Return the median over collectives of the range of their end times, in ns."""
    ends = _ends(members, fits)
    return float(np.median(np.ptp(ends, axis=1))) if ends is not None else float("inf")


def _distances(
    members: Sequence[MatchedCollective], fits: Mapping[int, ClockFit]
) -> NDArray[np.float64]:
    """Return the median difference of any two ranks' ends, (R, R) ns; (0, 0) without clocks."""
    ends = _ends(members, fits)
    if ends is None:
        return np.zeros((0, 0))
    # Limit the (K, R, R) array to MAX_CELLS by taking every n-th collective.
    sample = ends[:: max(1, len(ends) * ends.shape[1] ** 2 // MAX_CELLS)]
    median: NDArray[np.float64] = np.median(np.abs(sample[:, :, None] - sample[:, None, :]), axis=0)
    return median


def _groups_by_end(
    members: Sequence[MatchedCollective], fits: Mapping[int, ClockFit], max_distance: float
) -> list[tuple[int, ...]] | None:
    """Return groups of ranks that end together; None for a single group or a group of one rank."""
    ends = _ends(members, fits)
    if ends is None:
        return None
    ranks = list(members[0].ends_ns)
    distance = _distances(members, fits)
    groups: list[list[int]] = []
    # Single-linkage clustering of the ranks by the distance of their ends.
    for index, rank in enumerate(ranks):
        near = [
            g for g in groups if any(distance[index, ranks.index(r)] <= max_distance for r in g)
        ]
        merged = [rank, *(member for group in near for member in group)]
        groups = [group for group in groups if group not in near] + [merged]
    # A group of one has no collectives, so such a clustering is wrong.
    if len(groups) == 1 or min(map(len, groups)) == 1:
        return None
    return [tuple(sorted(group)) for group in groups]


def _part(collective: MatchedCollective, ranks: tuple[int, ...]) -> MatchedCollective:
    """Return the part of a matched collective that belongs to one group of ranks."""
    return evolve(
        collective,
        key=(collective.key, ranks),
        starts_ns={rank: collective.starts_ns[rank] for rank in ranks},
        ends_ns={rank: collective.ends_ns[rank] for rank in ranks},
        rows={rank: collective.rows[rank] for rank in ranks},
    )
