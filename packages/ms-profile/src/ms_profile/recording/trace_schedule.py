"""Tracer action of each step, as a pure function of the schedule and the step number."""

from enum import Enum, auto

from ms_profile.errors import CaptureError
from ms_profile.log.manifest import TraceSchedule


class StepAction(Enum):
    """Tracer action during a step, named as in torch's `ProfilerAction`."""

    NONE = auto()
    WARMUP = auto()
    RECORD = auto()
    RECORD_AND_SAVE = auto()
    """Record, and save when the step has ended."""


def check_schedule(schedule: TraceSchedule) -> TraceSchedule:
    """Return the schedule unchanged if it is valid.

    Raises:
        CaptureError: a number is out of range, or windows would overlap.
    """
    for name in ("skip", "warmup", "windows"):
        if getattr(schedule, name) < 0:
            raise CaptureError(
                f"{name} must be at least 0, got {getattr(schedule, name)}; use 0 for none"
            )
    if schedule.active < 1:
        raise CaptureError(
            f"active must be at least 1, got {schedule.active}; it is the steps per window"
        )
    window_steps = max(schedule.warmup, 1) + schedule.active
    if schedule.windows != 1 and schedule.every < window_steps:
        raise CaptureError(
            f"every must be at least {window_steps}, the steps of a window and its warmup (at "
            f"least 1 between windows), or windows would overlap; got {schedule.every}"
        )
    return schedule


def action_at(schedule: TraceSchedule, step: int) -> StepAction:
    """Return the tracer's action in a step, counted from 0."""
    steps_since_skip = step - schedule.skip
    if steps_since_skip < 0:
        return StepAction.NONE
    window, step_in_window = (
        (0, steps_since_skip) if schedule.windows == 1 else divmod(steps_since_skip, schedule.every)
    )
    if schedule.windows and window >= schedule.windows:
        return StepAction.NONE
    # A window: warmup steps, active steps, then nothing until the next window.
    if step_in_window < schedule.warmup:
        return StepAction.WARMUP
    last = schedule.warmup + schedule.active - 1
    if step_in_window > last:
        return StepAction.NONE
    return StepAction.RECORD_AND_SAVE if step_in_window == last else StepAction.RECORD
