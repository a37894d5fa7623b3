"""The alpha-beta model of a link: a message of n bytes takes `latency + n / bandwidth` seconds.

(R. W. Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994.)

The fit minimizes the squared logarithms of fitted / measured, so that predictions too long and too
short by the same factor count equally; least squares of the relative error would prefer short ones.
With h = latency * bandwidth, the size that takes twice the latency, the model is
latency * (1 + n / h). For each h the best latency is a geometric mean, and h is searched.
"""

from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from ms_profile.arguments import shown
from ms_profile.errors import LinkError

STEPS: Final = 64
ROUNDS: Final = 12
"""Values of h tried per round, and rounds; each searches between the neighbors of the best h."""
MIN_HALF, MAX_HALF = 1e-6, 1e9
"""Range of h, as a multiple of the smallest and of the largest size."""


class LinkFit(Struct, frozen=True, kw_only=True):
    """Fitted latency and bandwidth of a link."""

    latency_s: float
    """Alpha: one-way time of an empty message in seconds."""
    bandwidth_bytes_per_s: float | None
    """Inverse of beta, in bytes per second; None if the time does not grow with size."""
    residual: float
    """Root mean square of (measured - fitted) / measured."""


def fit_link(sizes_bytes: ArrayLike, times_s: ArrayLike) -> LinkFit:
    """Fit `time = latency + size / bandwidth` with errors as ratios.

    Args:
        sizes_bytes: (N,) message sizes.
        times_s: (N,) one-way times, positive.

    Raises:
        LinkError: fewer than two different sizes, or a time that is not positive.
    """
    sizes, times = numbers_of("sizes_bytes", sizes_bytes), numbers_of("times_s", times_s)
    if len(np.unique(sizes)) < 2 or len(sizes) != len(times) or not (times > 0).all():
        raise LinkError(
            f"sizes_bytes {sizes.tolist()} and times_s {times.tolist()} do not determine a line; "
            "pass two different sizes and positive times"
        )
    low = np.log(sizes[sizes > 0].min() * MIN_HALF)
    high = limit = np.log(sizes.max() * MAX_HALF)
    for _ in range(ROUNDS):
        halves = np.linspace(low, high, STEPS + 1)  # (K,) logarithms of h
        # (K, N) logarithm of the latency that each time alone would imply
        latencies = np.log(times) - np.log1p(sizes / np.exp(halves)[:, None])
        # The mean is the best latency for this h, so the variance is the remaining squared error.
        best = int(latencies.var(axis=1).argmin())
        low, high = halves[max(0, best - 1)], halves[min(STEPS, best + 1)]
    half, latency = np.exp(halves[best]), float(np.exp(latencies[best].mean()))
    # At the largest h, size has no effect on any measured time.
    grows = halves[best] < limit - 1
    fitted = latency * (1 + sizes / half)
    return LinkFit(
        latency_s=latency,
        bandwidth_bytes_per_s=float(half / latency) if grows else None,
        residual=float(np.sqrt(np.mean(((times - fitted) / times) ** 2))),
    )


def numbers_of(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Convert an argument to numbers (N,).

    Raises:
        LinkError: it is not a list of numbers.
    """
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(())
    if numbers.ndim != 1:
        raise LinkError(f"{name} must be a list of numbers, got {shown(values)}")
    return numbers
