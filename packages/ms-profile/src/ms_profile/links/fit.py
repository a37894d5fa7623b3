"""The alpha-beta model of a link: a message of n bytes takes `latency + n / bandwidth`."""

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike

from ms_profile.errors import LinkError


class LinkFit(Struct, frozen=True, kw_only=True):
    """Fitted latency and bandwidth of a link."""

    latency_s: float
    """Alpha: one-way time of an empty message in seconds."""
    bandwidth_bytes_per_s: float | None
    """Inverse of beta, in bytes per second; None if the time does not grow with size."""
    residual: float
    """Root mean square of (measured - fitted) / measured."""


def fit_link(sizes_bytes: ArrayLike, times_s: ArrayLike) -> LinkFit:
    """Fit `time = latency + size / bandwidth` with errors relative to the time.

    Args:
        sizes_bytes: (N,) message sizes.
        times_s: (N,) one-way times, positive.

    Raises:
        LinkError: fewer than two different sizes, or a time that is not positive.
    """
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    times = np.asarray(times_s, dtype=np.float64)
    if len(np.unique(sizes)) < 2 or not (times > 0).all():
        raise LinkError(
            f"sizes {sizes.tolist()} and times {times.tolist()} do not determine a line; "
            "pass two different sizes and positive times"
        )
    scale = sizes.max()
    columns = np.stack([np.ones_like(sizes), sizes / scale], axis=1) / times[:, None]
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)
    if latency < 0:  # not physical: fit a line through the origin instead
        latency = 0.0
        slope = float(columns[:, 1].sum() / (columns[:, 1] ** 2).sum())
    if slope <= 0:
        latency, slope = float(np.median(times)), 0.0
    fitted = latency + slope * sizes / scale
    return LinkFit(
        latency_s=float(latency),
        bandwidth_bytes_per_s=float(scale / slope) if slope > 0 else None,
        residual=float(np.sqrt(np.mean(((times - fitted) / times) ** 2))),
    )
