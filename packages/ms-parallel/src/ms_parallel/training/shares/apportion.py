"""Shares out rows over ranks of unequal speed, so that the slowest of them is done soonest."""

import heapq
from collections.abc import Sequence


def share_out(rows: int, speeds: Sequence[float], *, least: int = 1) -> tuple[int, ...]:
    """Share out rows to ranks such that the last one is done as early as can be.

    Each row goes to the rank that would be done with it first, the first of equals; no other way
    to share out whole rows ends earlier (Graham 1969, for jobs of equal length on machines of
    unequal speed).

    Args:
        rows: of the global batch.
        speeds: of each rank, in rows a second, all above 0.
        least: rows that each rank gets at any rate.
    """
    shares = [least] * len(speeds)
    done = [((least + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(done)
    for _ in range(rows - least * len(speeds)):
        _, rank = done[0]
        shares[rank] += 1
        heapq.heapreplace(done, ((shares[rank] + 1) / speeds[rank], rank))
    return tuple(shares)


def seconds_of(shares: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the seconds after which the last rank is done."""
    return max(rows / speed for rows, speed in zip(shares, speeds, strict=True))
