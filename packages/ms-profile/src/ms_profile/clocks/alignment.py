"""One time line for many clocks, from nothing but the ends of the collectives they took part in.

An all-reduce, all-gather, reduce-scatter, all-to-all or barrier cannot end on any rank before the
last rank has entered it, and then ends on all at nearly one instant `T[k]`. A rank's clock `c` is
taken as linear: `T = c - offset - drift * (c - origin)`. Offsets, drifts and instants `T[k]` are
fitted together by least squares, the instants eliminated, so that ranks which meet only in
subgroups (pipelines, tensor pairs) are aligned through those they share. Ends that came late, as
some always do on a busy host, lose weight (Huber).

Two errors are given. `error_ns` is statistical: 99% of the fit's own uncertainty anywhere in the
recorded span. `bound_ns` is proved, from causality alone: no end before the other's start.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ms_profile.errors import ClockError

SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Collectives whose end on one rank waits for every other; a broadcast's or a send's does not."""

Floats = NDArray[np.float64]
HUBER = 1.5
STUDENT_99 = (63.66, 9.925, 5.841, 4.604)
SAMPLES_FOR_DRIFT = 4
PLAUSIBLE_DRIFT = 3e-4  # crystals keep within 1e-4; a steeper slope is noise of a short recording


class ClockFit(Struct, frozen=True, kw_only=True):
    """Offset and drift of one rank's clock against the reference's."""

    rank: int
    origin_ns: int
    """The instant of this rank's own clock at which `offset_ns` holds."""
    offset_ns: float
    """How far this clock is ahead of the reference's at `origin_ns`."""
    drift: float
    """Seconds this clock gains in each of its seconds (1e-6 is a ppm)."""
    error_ns: float | None
    """Half width of the 99% interval of a corrected instant inside the recorded span.

    None where so few collectives were shared that nothing is left over to judge the fit by."""
    bound_ns: float | None
    """Proved largest error of a constant offset; None without starts shared with the reference."""
    samples: int
    """Collectives that this rank took part in."""

    def correct(self, instants_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Turn instants of this rank's clock (N,) int64 ns into the reference's."""
        instants = np.asarray(instants_ns, dtype=np.int64)
        since = (instants - self.origin_ns).astype(np.float64)
        return instants - np.rint(self.offset_ns + self.drift * since).astype(np.int64)


def align_clocks(
    ends: Mapping[int, Mapping[Hashable, int]],
    starts: Mapping[int, Mapping[Hashable, int]] | None = None,
    *,
    reference: int | None = None,
) -> dict[int, ClockFit]:
    """Fit every rank's offset and drift against the reference's clock.

    Args:
        ends: for each rank, the instant (ns, of that rank's clock) at which each collective ended
            there. A collective's key is the same on all ranks: its group and its place in the
            group's order, for instance. Give only kinds in `SYNCHRONIZING`.
        starts: likewise the instants at which the rank entered it, for `bound_ns`.
        reference: the rank whose clock is taken as true; the lowest when None.

    Returns:
        A fit for each rank that shares collectives with the reference, directly or through others.
        Ranks that do not are left out: their clocks cannot be compared.

    Raises:
        ClockError: the reference has no collectives.
    """
    ranks = sorted(rank for rank, own in ends.items() if own)
    chosen = reference if reference is not None else (ranks[0] if ranks else None)
    if chosen is None or chosen not in ranks:
        raise ClockError(f"rank {chosen} has no collectives; clocks are aligned by shared ones")
    ranks = _reachable(ends, ranks, chosen)
    keys = _shared_keys(ends, ranks)
    origins = [min((ends[r][k] for k in keys if k in ends[r]), default=0) for r in ranks]
    if len(ranks) == 1 or not keys:
        return {chosen: _identity(chosen, origins[0], len(ends[chosen]))}
    readings = _table(ends, ranks, keys, origins)
    entered = None if starts is None else _table(starts, ranks, keys, origins)
    return _fit_all(ranks, ranks.index(chosen), origins, readings, entered)


def _identity(rank: int, origin_ns: int, samples: int) -> ClockFit:
    return ClockFit(
        rank=rank, origin_ns=origin_ns, offset_ns=0.0, drift=0.0, error_ns=0.0, bound_ns=0.0,
        samples=samples,
    )  # fmt: skip


def _reachable(
    ends: Mapping[int, Mapping[Hashable, int]], ranks: Sequence[int], start: int
) -> list[int]:
    """Return the ranks connected with `start` by shared collectives, sorted."""
    members: dict[Hashable, list[int]] = {}
    for rank in ranks:
        for key in ends[rank]:
            members.setdefault(key, []).append(rank)
    found, waiting, seen = {start}, [start], set[Hashable]()
    while waiting:
        for key in ends[waiting.pop()].keys() - seen:
            seen.add(key)
            new = set(members[key]) - found
            found |= new
            waiting.extend(new)
    return sorted(found)


def _shared_keys(
    ends: Mapping[int, Mapping[Hashable, int]], ranks: Sequence[int]
) -> list[Hashable]:
    """List the keys that at least two of the ranks have, in order of first appearance."""
    count: dict[Hashable, int] = {}
    for rank in ranks:
        for key in ends[rank]:
            count[key] = count.get(key, 0) + 1
    return [key for key, number in count.items() if number > 1]


def _table(
    instants: Mapping[int, Mapping[Hashable, int]],
    ranks: Sequence[int],
    keys: Sequence[Hashable],
    origins: Sequence[int],
) -> Floats:
    """Tabulate instants since each rank's origin as (K, R) float64 ns, nan where absent."""
    table = np.full((len(keys), len(ranks)), np.nan)
    for column, (rank, origin) in enumerate(zip(ranks, origins, strict=True)):
        own = instants.get(rank, {})
        for row, key in enumerate(keys):
            if (instant := own.get(key)) is not None:
                table[row, column] = instant - origin
    return table


def _fit_all(
    ranks: Sequence[int],
    base: int,
    origins: Sequence[int],
    readings: Floats,
    entered: Floats | None,
) -> dict[int, ClockFit]:
    """Fit (K, R) readings relative to each rank's origin; see `align_clocks`."""
    present = np.isfinite(readings)
    span = float(np.nanmax(readings)) or 1.0
    samples = present.sum(axis=0)
    drifting = (samples >= SAMPLES_FOR_DRIFT) & (np.arange(len(ranks)) != base)
    shifting = np.arange(len(ranks)) != base
    weights = present.astype(np.float64)
    offset = np.zeros(len(ranks))
    drift = np.zeros(len(ranks))
    covariance = np.zeros((2 * len(ranks), 2 * len(ranks)))
    free = np.concatenate([shifting, drifting])
    scale = 1.0
    for turn in range(24):
        normal, right = _normal_equations(np.where(present, readings, 0.0), weights, span)
        solution = np.zeros(2 * len(ranks))
        chosen = np.ix_(free, free)
        inverse = np.linalg.pinv(normal[chosen], hermitian=True)
        solution[free] = inverse @ right[free]
        covariance[chosen] = inverse
        offset, drift = solution[: len(ranks)], solution[len(ranks) :] / span
        if turn == 11 and (implausible := np.abs(drift) > PLAUSIBLE_DRIFT).any():
            free[len(ranks) :] &= ~implausible
            covariance[:] = 0.0
        elif turn == 11:
            break
        residuals = _residuals(readings, weights, offset, drift)
        scale = max(1.4826 * float(np.nanmedian(np.abs(residuals))), 1e-3)
        reach = HUBER * scale / np.maximum(np.abs(np.where(present, residuals, 0.0)), 1e-12)
        weights = np.where(present, np.minimum(1.0, reach), 0.0)
    left = int(present.sum()) - len(readings) - int(free.sum())
    errors = _errors(covariance, scale, int(present.sum()), left)
    bounds = _bounds(readings, entered, offset, drift, base)
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
    """Build the normal matrix (2R, 2R) and right side (2R,) for offsets and drifts * span.

    Their solution minimises `sum w (c - offset - drift x - T[k])²` with `T[k]` eliminated.
    """
    slopes = weights * (readings / span)
    total = weights.sum(axis=1, keepdims=True)
    both = np.concatenate([weights, slopes], axis=1)
    width = weights.shape[1]
    normal = -both.T @ (both / total)
    corner = np.arange(width)
    normal[corner, corner] += weights.sum(axis=0)
    cross = slopes.sum(axis=0)
    normal[corner, corner + width] += cross
    normal[corner + width, corner] += cross
    normal[corner + width, corner + width] += (slopes * (readings / span)).sum(axis=0)
    means = (weights * readings).sum(axis=1, keepdims=True) / total
    right = (both * np.tile(readings - means, 2)).sum(axis=0)
    return normal, right


def _residuals(readings: Floats, weights: Floats, offset: Floats, drift: Floats) -> Floats:
    """Subtract from corrected readings the instant they agree on, (K, R) ns, nan where absent."""
    corrected = readings - offset - drift * readings
    filled = np.where(np.isfinite(corrected), corrected, 0.0)
    agreed = (weights * filled).sum(axis=1, keepdims=True) / weights.sum(axis=1, keepdims=True)
    residuals: Floats = corrected - agreed
    return residuals


def _errors(covariance: Floats, scale: float, observations: int, left: int) -> list[float | None]:
    """Compute each rank's largest 99% half width of offset + drift * x over the span, at an end.

    Args:
        covariance: of offsets and drifts, (2R, 2R), for residuals of 1 ns.
        scale: of the residuals, ns.
        observations: how many ends were fitted.
        left: of these, those that instants and parameters did not take.
    """
    width = len(covariance) // 2
    if left <= 0:
        return [None] * width
    corner = np.arange(width)
    at_start = covariance[corner, corner]
    slope = covariance[corner + width, corner + width]
    at_end = at_start + slope + 2 * covariance[corner, corner + width]
    variance = np.maximum(np.maximum(at_start, at_end), 0.0)
    spread = scale * (observations / left) ** 0.5
    half_width: list[float | None] = (_quantile_99(left) * spread * np.sqrt(variance)).tolist()
    return half_width


def _quantile_99(freedom: int) -> float:
    """Return Student's two-sided 99% quantile; past the table by its expansion in 1 / freedom."""
    if freedom <= len(STUDENT_99):
        return STUDENT_99[freedom - 1]
    return 2.576 + 4.92 / freedom + 8.85 / freedom**2


def _bounds(
    readings: Floats, entered: Floats | None, offset: Floats, drift: Floats, base: int
) -> list[float | None]:
    """Prove the error of each rank's offset, from starts and ends shared with the reference."""
    width = readings.shape[1]
    if entered is None:
        return [0.0 if column == base else None for column in range(width)]
    ends = readings - offset - drift * readings
    starts = entered - offset - drift * entered
    found: list[float | None] = []
    for column in range(width):
        latest = ends[:, column] - starts[:, base]
        earliest = starts[:, column] - ends[:, base]
        known = np.isfinite(latest) & np.isfinite(earliest)
        if column == base:
            found.append(0.0)
        elif not known.any():
            found.append(None)
        else:
            upper, lower = float(latest[known].min()), float(earliest[known].max())
            found.append(max(abs(upper), abs(lower)))
    return found
