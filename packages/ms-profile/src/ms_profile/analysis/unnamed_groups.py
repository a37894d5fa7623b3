"""Separate process groups where the backend doesn't name them, as gloo doesn't.

Two rows of a grid that gather among themselves look like one gathering of all. But members of one
group see a synchronising collective end at nearly one instant, and members of different groups
don't. So clocks are first taken from the collectives whose ends agree best; on these clocks the
ranks of every other kind that end together, collective by collective, are its groups.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ms_profile.analysis.collectives import MatchedCollective
from ms_profile.analysis.shared_clock import align_collectives
from ms_profile.clocks.alignment import SYNCHRONISING, ClockFit

LEAST_SPREAD_NS: Final = 60_000.0
LEAST_DISTANCE_NS: Final = 20_000.0
MOST_CELLS: Final = 4_000_000
LEAST_MATCHED: Final = 3


def split_groups(
    matched: Sequence[MatchedCollective], hosts: Mapping[int, str]
) -> tuple[MatchedCollective, ...]:
    """Split collectives of unnamed groups among the ranks that took part together.

    Args:
        matched: as `ms_profile.analysis.collectives.match_collectives` paired them.
        hosts: of every rank; empty where not known.
    """
    series: dict[Hashable, list[MatchedCollective]] = defaultdict(list)
    for one in matched:
        series[one.kind, one.group, one.size_bytes, tuple(one.starts_ns)].append(one)
    candidates = {
        key
        for key, own in series.items()
        if not own[0].group
        and len(own[0].starts_ns) > 2
        and own[0].kind in SYNCHRONISING
        and len(own) >= LEAST_MATCHED
    }
    if not candidates:
        return tuple(matched)
    rough = align_collectives(matched, hosts)
    spread = {key: _spread(own, rough) for key, own in series.items()}
    limit = max(2 * min(spread.values()), LEAST_SPREAD_NS)
    trusted = [one for key, own in series.items() if spread[key] <= limit for one in own]
    fits = align_collectives(trusted, hosts)
    closest = [_distances(own, fits) for key, own in series.items() if spread[key] <= limit]
    usual = [float(np.median(table[table > 0])) for table in closest if (table > 0).any()]
    apart = max(3 * min(usual, default=0.0), LEAST_DISTANCE_NS)
    found: list[MatchedCollective] = []
    for key, own in series.items():
        groups = _together(own, fits, apart) if key in candidates else None
        found += own if groups is None else [_part(one, g) for one in own for g in groups]
    return tuple(found)


def _ends(
    own: Sequence[MatchedCollective], fits: Mapping[int, ClockFit]
) -> NDArray[np.float64] | None:
    """Put ends on one clock, (K, R) ns since the first; None where a clock is not known."""
    ranks = list(own[0].ends_ns)
    if any(rank not in fits for rank in ranks):
        return None
    columns = [fits[rank].correct(np.array([one.ends_ns[rank] for one in own])) for rank in ranks]
    table = np.stack(columns, axis=1)
    since: NDArray[np.float64] = (table - table.min()).astype(np.float64)
    return since


def _spread(own: Sequence[MatchedCollective], fits: Mapping[int, ClockFit]) -> float:
    """Measure how far the ends of one kind lie apart in the median."""
    ends = _ends(own, fits)
    return float(np.median(np.ptp(ends, axis=1))) if ends is not None else float("inf")


def _distances(
    own: Sequence[MatchedCollective], fits: Mapping[int, ClockFit]
) -> NDArray[np.float64]:
    """Measure how far two ranks' ends lie apart in the median, (R, R) ns; (0, 0) without clocks."""
    ends = _ends(own, fits)
    if ends is None:
        return np.zeros((0, 0))
    few = ends[:: max(1, len(ends) * ends.shape[1] ** 2 // MOST_CELLS)]
    found: NDArray[np.float64] = np.median(np.abs(few[:, :, None] - few[:, None, :]), axis=0)
    return found


def _together(
    own: Sequence[MatchedCollective], fits: Mapping[int, ClockFit], apart: float
) -> list[tuple[int, ...]] | None:
    """Return the ranks that end together; None where all do, or where one would be left alone."""
    ends = _ends(own, fits)
    if ends is None:
        return None
    ranks = list(own[0].ends_ns)
    distance = _distances(own, fits)
    groups: list[list[int]] = []
    for place, rank in enumerate(ranks):
        near = [g for g in groups if any(distance[place, ranks.index(r)] <= apart for r in g)]
        merged = [rank, *(member for group in near for member in group)]
        groups = [group for group in groups if group not in near] + [merged]
    if len(groups) == 1 or min(map(len, groups)) == 1:
        return None
    return [tuple(sorted(group)) for group in groups]


def _part(one: MatchedCollective, ranks: tuple[int, ...]) -> MatchedCollective:
    """Take one group's collective out of several that were taken for one."""
    return evolve(
        one,
        key=(one.key, ranks),
        starts_ns={rank: one.starts_ns[rank] for rank in ranks},
        ends_ns={rank: one.ends_ns[rank] for rank in ranks},
        rows={rank: one.rows[rank] for rank in ranks},
    )
