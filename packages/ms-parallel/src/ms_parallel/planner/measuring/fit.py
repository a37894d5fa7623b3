"""Fits latency and bandwidth to the times of messages of several sizes.

A message of n bytes takes a + n / b seconds (R. W. Hockney, The communication challenge for MPP,
Parallel Computing 20(3), 1994). Errors count as factors, too long like too short: the sum of the
squared logarithms of what is said over what was measured is least. With h = a b, the size that
takes twice the latency, what is said is a (1 + n / h); for each h the best a is a geometric mean,
and the best h is searched for.
"""

from collections.abc import Sequence
from math import exp, log, log1p
from statistics import fmean

from ms_parallel.errors import ConfigError
from ms_parallel.planner.cluster import Link

LEAST_LATENCY_US, LEAST_GB_PER_S, MOST_GB_PER_S = 1e-3, 1e-6, 1e9
LEAST_HALF, MOST_HALF = 1e-2, 1e14
"""Bytes between which the size of twice the latency lies."""
STEPS, ROUNDS = 64, 12
"""Places that are tried in a round, and rounds, each between the neighbours of the best place."""


def fit_link(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> Link:
    """Find the link whose times come closest to the measured ones, by ratio.

    Args:
        sizes_bytes: of messages; at least two different ones.
        times_s: that each took one way, in seconds; above 0.

    Raises:
        ConfigError: there are too few sizes, or a time is not above 0.
    """
    if len(set(sizes_bytes)) < 2 or len(sizes_bytes) != len(times_s) or min(times_s) <= 0:
        raise ConfigError(
            f"{len(set(sizes_bytes))} sizes with {len(times_s)} times do not tell a link; measure"
            " two sizes or more"
        )
    pairs = list(zip(sizes_bytes, map(log, times_s), strict=True))
    low, high = log(LEAST_HALF), log(MOST_HALF)
    for _ in range(ROUNDS):
        places = [low + (high - low) * step / STEPS for step in range(STEPS + 1)]
        best = min(range(STEPS + 1), key=lambda step: _spread(pairs, exp(places[step])))
        low, high = places[max(0, best - 1)], places[min(STEPS, best + 1)]
    half = exp((low + high) / 2)
    latency_s = exp(fmean(_logarithms(pairs, half)))
    return Link(
        latency_us=rounded(max(LEAST_LATENCY_US, latency_s * 1e6)),
        bandwidth_gb_per_s=rounded(min(MOST_GB_PER_S, max(LEAST_GB_PER_S, half / latency_s / 1e9))),
    )


def rounded(value: float) -> float:
    """Round to the four digits that are measured at most."""
    return float(f"{value:.4g}")


def _logarithms(pairs: Sequence[tuple[int, float]], half: float) -> list[float]:
    """Return the logarithm of the latency that each time alone would mean."""
    return [time - log1p(size / half) for size, time in pairs]


def _spread(pairs: Sequence[tuple[int, float]], half: float) -> float:
    """Return the sum of squares that the best latency leaves."""
    found = _logarithms(pairs, half)
    middle = fmean(found)
    return sum((value - middle) ** 2 for value in found)
