"""Which steps are traced: a pure function of the schedule and the step's number."""

from enum import Enum, auto

from ms_profile.errors import CaptureError
from ms_profile.log.manifest import TraceSchedule


class StepAction(Enum):
    """What the tracer does during a step, by the names of torch's `ProfilerAction`."""

    NONE = auto()
    WARMUP = auto()
    RECORD = auto()
    RECORD_AND_SAVE = auto()
    """Record, and save when the step is over."""


def check_schedule(schedule: TraceSchedule) -> TraceSchedule:
    """Return the schedule if it makes sense.

    Raises:
        CaptureError: a number is out of range, or windows would overlap.
    """
    for name in ("skip", "warmup", "windows"):
        if getattr(schedule, name) < 0:
            raise CaptureError(f"{name} is {getattr(schedule, name)}; it must be 0 or more")
    if schedule.active < 1:
        raise CaptureError(f"active is {schedule.active}; a window must record at least one step")
    length = max(schedule.warmup, 1) + schedule.active
    if schedule.windows != 1 and schedule.every < length:
        raise CaptureError(
            f"every is {schedule.every}, less than a window of {length} steps with its warmup, "
            "of which there is at least one between windows; they would overlap"
        )
    return schedule


def action_at(schedule: TraceSchedule, step: int) -> StepAction:
    """Return what the tracer does in a step, counted from 0."""
    since = step - schedule.skip
    if since < 0:
        return StepAction.NONE
    number, within = (0, since) if schedule.windows == 1 else divmod(since, schedule.every)
    if schedule.windows and number >= schedule.windows:
        return StepAction.NONE
    if within < schedule.warmup:
        return StepAction.WARMUP
    last = schedule.warmup + schedule.active - 1
    if within > last:
        return StepAction.NONE
    return StepAction.RECORD_AND_SAVE if within == last else StepAction.RECORD
