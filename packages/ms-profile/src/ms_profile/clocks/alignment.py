"""Align the clocks of ranks using only the ends of the collectives they took part in.

An all-reduce, all-gather, reduce-scatter, all-to-all or barrier cannot end on any rank before the
last rank has entered it, and then ends on all ranks at nearly the same time `T[k]`. A rank's clock
`c` is modeled as linear: `T = c - offset - drift * (c - origin)`. Offsets, drifts and times `T[k]`
are fitted together by least squares with the times eliminated, so ranks that meet only in subgroups
(pipelines, tensor parallel pairs) are aligned through common members. Late ends, which occur on any
busy host, get less weight (Huber loss).

There are two error estimates. `error_ns` is statistical: the fit's own 99% uncertainty anywhere in
the recorded time span. `bound_ns` follows from causality alone: no end precedes another's start.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ms_profile.arguments import check_integer, check_type
from ms_profile.errors import ClockError

SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives that end on a rank only after all ranks have entered; not so broadcast or send."""

Floats = NDArray[np.float64]
HUBER = 1.5  # in units of the residuals' scale; larger residuals get less weight
STUDENT_99 = (63.66, 9.925, 5.841, 4.604)  # two-sided 99% quantiles, 1 to 4 degrees of freedom
SAMPLES_FOR_DRIFT = 4  # with fewer collectives, only an offset is fitted
PLAUSIBLE_DRIFT = (
    3e-4  # crystal oscillators are accurate to 1e-4; a larger drift is noise of a short recording
)


class ClockFit(Struct, frozen=True, kw_only=True):
    """Offset and drift of one rank's clock relative to the reference clock."""

    rank: int
    origin_ns: int
    """Time on this rank's clock at which `offset_ns` holds."""
    offset_ns: float
    """How far this clock is ahead of the reference at `origin_ns`."""
    drift: float
    """Relative rate: this clock gains `drift` seconds per second (1e-6 is 1 ppm)."""
    error_ns: float | None
    """Half width of the 99% interval of a corrected time inside the recorded time span.

    None if there are too few shared collectives to estimate it."""
    bound_ns: float | None
    """Guaranteed bound on the offset's error; None without starts shared with the reference."""
    samples: int
    """Number of collectives that this rank took part in."""

    def correct(self, times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert times of this rank's clock, (N,) int64 ns, to the reference clock."""
        times = np.asarray(times_ns, dtype=np.int64)
        since_origin = (times - self.origin_ns).astype(np.float64)
        # Subtracted in int64: float64 resolves only 256 ns at nanoseconds since 1970.
        return times - np.rint(self.offset_ns + self.drift * since_origin).astype(np.int64)


def align_clocks(
    ends: Mapping[int, Mapping[Hashable, int]],
    starts: Mapping[int, Mapping[Hashable, int]] | None = None,
    *,
    reference: int | None = None,
) -> dict[int, ClockFit]:
    """Fit every rank's offset and drift relative to the reference clock.

    Args:
        ends: for each rank, the end of each collective in ns of that rank's clock, by a key that is
            the same on all ranks, such as (group, sequence number). Include only collectives of the
            kinds in `SYNCHRONIZING`.
        starts: start of each collective in the same form, for `bound_ns`.
        reference: rank of the reference clock. None: the lowest rank.

    Returns:
        A fit for each rank that shares collectives with the reference, directly or through other
        ranks. Other ranks are omitted, as their clocks cannot be compared.

    Raises:
        ClockError: the reference has no collectives.
    """
    for name, times in (("ends", ends), ("starts", starts)):
        optional = name == "starts"
        description = "a dict of each rank's times by collective"
        check_type(name, times, Mapping, description, error=ClockError, optional=optional)
        for rank_times in (times or {}).values():
            check_type(name, rank_times, Mapping, description, error=ClockError)
    check_integer("reference", reference, minimum=0, error=ClockError, optional=True)
    ranks = sorted(rank for rank, times in ends.items() if times)
    base_rank = reference if reference is not None else (ranks[0] if ranks else None)
    if base_rank is None or base_rank not in ranks:
        raise ClockError(
            f"rank {base_rank} has no collectives; clocks can only be aligned by shared collectives"
        )
    ranks = _reachable(ends, ranks, base_rank)
    keys = _shared_keys(ends, ranks)
    # Times relative to each rank's first shared end are small enough for float64.
    origins = [min((ends[r][k] for k in keys if k in ends[r]), default=0) for r in ranks]
    if len(ranks) == 1 or not keys:
        return {base_rank: _identity(base_rank, origins[0], len(ends[base_rank]))}
    readings = _table(ends, ranks, keys, origins)
    start_readings = None if starts is None else _table(starts, ranks, keys, origins)
    return _fit_all(ranks, ranks.index(base_rank), origins, readings, start_readings)


def _identity(rank: int, origin_ns: int, samples: int) -> ClockFit:
    return ClockFit(
        rank=rank, origin_ns=origin_ns, offset_ns=0.0, drift=0.0, error_ns=0.0, bound_ns=0.0,
        samples=samples,
    )  # fmt: skip


def _reachable(
    ends: Mapping[int, Mapping[Hashable, int]], ranks: Sequence[int], start: int
) -> list[int]:
    """Return the ranks connected with `start` through shared collectives, sorted."""
    members: dict[Hashable, list[int]] = {}
    for rank in ranks:
        for key in ends[rank]:
            members.setdefault(key, []).append(rank)
    # Search of the graph in which a collective connects its ranks; each collective is visited once.
    connected, queue, visited = {start}, [start], set[Hashable]()
    while queue:
        for key in ends[queue.pop()].keys() - visited:
            visited.add(key)
            new = set(members[key]) - connected
            connected |= new
            queue.extend(new)
    return sorted(connected)


def _shared_keys(
    ends: Mapping[int, Mapping[Hashable, int]], ranks: Sequence[int]
) -> list[Hashable]:
    """Return the keys that at least two ranks have, in order of first appearance."""
    count: dict[Hashable, int] = {}
    for rank in ranks:
        for key in ends[rank]:
            count[key] = count.get(key, 0) + 1
    return [key for key, number in count.items() if number > 1]


def _table(
    times_ns: Mapping[int, Mapping[Hashable, int]],
    ranks: Sequence[int],
    keys: Sequence[Hashable],
    origins: Sequence[int],
) -> Floats:
    """Return times since each rank's origin as (K keys, R ranks) float64 ns, nan where absent."""
    table = np.full((len(keys), len(ranks)), np.nan)
    for column, (rank, origin) in enumerate(zip(ranks, origins, strict=True)):
        rank_times = times_ns.get(rank, {})
        for row, key in enumerate(keys):
            if (time_ns := rank_times.get(key)) is not None:
                table[row, column] = time_ns - origin
    return table


def _fit_all(
    ranks: Sequence[int],
    base: int,
    origins: Sequence[int],
    readings: Floats,
    start_readings: Floats | None,
) -> dict[int, ClockFit]:
    """Fit (K, R) readings in ns since each rank's origin; see `align_clocks`."""
    present = np.isfinite(readings)
    span = float(np.nanmax(readings)) or 1.0
    samples = present.sum(axis=0)
    # The reference defines offset 0 and drift 0, so neither is fitted for it.
    has_drift = (samples >= SAMPLES_FOR_DRIFT) & (np.arange(len(ranks)) != base)
    has_offset = np.arange(len(ranks)) != base
    weights = present.astype(np.float64)
    offset = np.zeros(len(ranks))
    drift = np.zeros(len(ranks))
    covariance = np.zeros((2 * len(ranks), 2 * len(ranks)))
    # (2R,) mask of the fitted parameters: all offsets, then all drifts in units of 1 / span.
    free = np.concatenate([has_offset, has_drift])
    scale = 1.0
    # Iteratively reweighted least squares with Huber weights: 12 rounds, and 12 more without the
    # implausible drifts if there are any.
    for iteration in range(24):
        normal, right = _normal_equations(np.where(present, readings, 0.0), weights, span)
        solution = np.zeros(2 * len(ranks))
        free_block = np.ix_(free, free)
        # Pseudoinverse, as a drift is undetermined if a rank's ends nearly coincide.
        inverse = np.linalg.pinv(normal[free_block], hermitian=True)
        solution[free] = inverse @ right[free]
        covariance[free_block] = inverse
        offset, drift = solution[: len(ranks)], solution[len(ranks) :] / span
        # Refit without the implausible drifts, whose covariances must not remain.
        if iteration == 11 and (implausible := np.abs(drift) > PLAUSIBLE_DRIFT).any():
            free[len(ranks) :] &= ~implausible
            covariance[:] = 0.0
        elif iteration == 11:
            break
        residuals = _residuals(readings, weights, offset, drift)
        # The median of absolute residuals times 1.4826 estimates the standard deviation.
        scale = max(1.4826 * float(np.nanmedian(np.abs(residuals))), 1e-3)
        huber_weight = HUBER * scale / np.maximum(np.abs(np.where(present, residuals, 0.0)), 1e-12)
        weights = np.where(present, np.minimum(1.0, huber_weight), 0.0)
    # Each collective's T[k] and each free parameter cost one degree of freedom.
    freedom = int(present.sum()) - len(readings) - int(free.sum())
    errors = _errors(covariance, scale, int(present.sum()), freedom)
    bounds = _bounds(readings, start_readings, offset, drift, base)
    fits = {}
    for column, rank in enumerate(ranks):
        fits[rank] = ClockFit(
            rank=rank,
            origin_ns=origins[column],
            offset_ns=float(origins[column] - origins[base] + offset[column]),
            drift=float(drift[column]),
            error_ns=0.0 if column == base else errors[column],
            bound_ns=bounds[column],
            samples=int(samples[column]),
        )
    return fits


def _normal_equations(readings: Floats, weights: Floats, span: float) -> tuple[Floats, Floats]:
    """Return the normal matrix (2R, 2R) and right side (2R,) for offsets and drifts * span.

    Their solution minimizes `sum w (c - offset - drift x - T[k])²` with `T[k]` eliminated.
    """
    slopes = weights * (readings / span)
    total = weights.sum(axis=1, keepdims=True)
    # (K, 2R): a row has the weighted derivatives by the offsets, then by the drifts * span.
    both = np.concatenate([weights, slopes], axis=1)
    width = weights.shape[1]
    # Eliminating T[k] (Schur complement) subtracts row k's outer product over its total weight.
    normal = -both.T @ (both / total)
    index = np.arange(width)
    # Blocks of the plain normal matrix: offset-offset, offset-drift and drift-drift are diagonal.
    normal[index, index] += weights.sum(axis=0)
    cross = slopes.sum(axis=0)
    normal[index, index + width] += cross
    normal[index + width, index] += cross
    normal[index + width, index + width] += (slopes * (readings / span)).sum(axis=0)
    means = (weights * readings).sum(axis=1, keepdims=True) / total  # (K, 1)
    right = (both * np.tile(readings - means, 2)).sum(axis=0)
    return normal, right


def _residuals(readings: Floats, weights: Floats, offset: Floats, drift: Floats) -> Floats:
    """Return corrected readings minus their weighted mean per collective, (K, R) ns."""
    corrected = readings - offset - drift * readings
    filled = np.where(np.isfinite(corrected), corrected, 0.0)
    mean = (weights * filled).sum(axis=1, keepdims=True) / weights.sum(axis=1, keepdims=True)
    residuals: Floats = corrected - mean
    return residuals


def _errors(
    covariance: Floats, scale: float, observations: int, freedom: int
) -> list[float | None]:
    """Return each rank's 99% half width of offset + drift * x, at the worse end of the time span.

    Args:
        covariance: covariance of offsets and drifts, (2R, 2R), for residuals of 1 ns.
        scale: scale of the residuals in ns.
        observations: number of fitted ends.
        freedom: degrees of freedom: observations minus fitted times and parameters.
    """
    width = len(covariance) // 2
    if freedom <= 0:
        return [None] * width
    index = np.arange(width)
    at_start = covariance[index, index]
    slope = covariance[index + width, index + width]
    # Variance of offset + drift * x at x = span, as drifts are in units of 1 / span.
    at_end = at_start + slope + 2 * covariance[index, index + width]
    variance = np.maximum(np.maximum(at_start, at_end), 0.0)
    # The fit makes residuals smaller than the errors; this corrects for the fitted parameters.
    std = scale * (observations / freedom) ** 0.5
    half_width: list[float | None] = (_quantile_99(freedom) * std * np.sqrt(variance)).tolist()
    return half_width


def _quantile_99(freedom: int) -> float:
    """Return Student's two-sided 99% quantile; an expansion in 1 / freedom beyond the table."""
    if freedom <= len(STUDENT_99):
        return STUDENT_99[freedom - 1]
    return 2.576 + 4.92 / freedom + 8.85 / freedom**2


def _bounds(
    readings: Floats, start_readings: Floats | None, offset: Floats, drift: Floats, base: int
) -> list[float | None]:
    """Bound the error of each rank's offset by starts and ends shared with the reference."""
    width = readings.shape[1]
    if start_readings is None:
        return [0.0 if column == base else None for column in range(width)]
    ends = readings - offset - drift * readings
    starts = start_readings - offset - drift * start_readings
    bounds: list[float | None] = []
    for column in range(width):
        # If this clock is ahead by e, causality demands earliest <= e <= latest for every
        # collective: neither rank's end may precede the other's start.
        latest = ends[:, column] - starts[:, base]
        earliest = starts[:, column] - ends[:, base]
        shared = np.isfinite(latest) & np.isfinite(earliest)
        if column == base:
            bounds.append(0.0)
        elif not shared.any():
            bounds.append(None)
        else:
            upper, lower = float(latest[shared].min()), float(earliest[shared].max())
            bounds.append(max(abs(upper), abs(lower)))
    return bounds
