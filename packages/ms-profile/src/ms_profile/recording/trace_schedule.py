"""Which steps are traced: a pure function of the window and the step's number."""

from enum import Enum

from ms_profile.errors import CaptureError
from ms_profile.log.manifest import Window

__all__ = ["Phase", "check_window", "phase_of"]


class Phase(Enum):
    """What the tracer does during a step."""

    REST = "rest"
    WARM = "warm"
    RECORD = "record"
    LAST = "last"
    """Record, and save when the step is over."""


def check_window(window: Window) -> Window:
    """Return the window if it makes sense.

    Raises:
        CaptureError: a number is out of range, or windows would overlap.
    """
    for name in ("skip", "warmup", "windows"):
        if getattr(window, name) < 0:
            raise CaptureError(f"{name} is {getattr(window, name)}; it must be 0 or more")
    if window.active < 1:
        raise CaptureError(f"active is {window.active}; a window must record at least one step")
    length = max(window.warmup, 1) + window.active
    if window.windows != 1 and window.every < length:
        raise CaptureError(
            f"every is {window.every}, less than a window of {length} steps with its warmup, "
            "of which there is at least one between windows; they would overlap"
        )
    return window


def phase_of(window: Window, step: int) -> Phase:
    """What happens in a step, counted from 0."""
    since = step - window.skip
    if since < 0:
        return Phase.REST
    number, within = (0, since) if window.windows == 1 else divmod(since, window.every)
    if window.windows and number >= window.windows:
        return Phase.REST
    if within < window.warmup:
        return Phase.WARM
    last = window.warmup + window.active - 1
    if within > last:
        return Phase.REST
    return Phase.LAST if within == last else Phase.RECORD
