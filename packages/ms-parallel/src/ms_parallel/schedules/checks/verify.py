"""Proves before any process starts that a schedule is correct and terminates.

The assumed transport is the strictest: a rank runs one action at a time, and a send blocks until
its peer is at the matching receive. A schedule that terminates on it does so on every transport
that keeps messages between two ranks in order.
"""

from collections import Counter
from collections.abc import Iterator

from attrs import frozen

from ms_parallel.arguments import check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.checks.messages import check_pairing, check_progress
from ms_parallel.schedules.checks.stage_actions import check_stage_actions, check_waits
from ms_parallel.schedules.table.action import RECEIVES, SENDS, Action, Kind
from ms_parallel.schedules.table.event_simulation import sources
from ms_parallel.schedules.table.schedule import Schedule

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


@frozen(kw_only=True)
class Report:
    """Properties of a verified schedule."""

    peak_activations: tuple[int, ...]
    """Maximum number of live (stage, microbatch) activations per rank: from the forward to the end
    of the full backward or of the weight backward."""
    messages: int
    """Messages between ranks per step: activations and gradients."""


def verify(schedule: Schedule) -> Report:
    """Check completeness, order, matching messages, gathered weights, and absence of deadlock.

    Raises:
        ScheduleError: describes the first failing check, for the smallest microbatch and stage, or
            the shortest cycle of ranks that wait for each other.
    """
    check_type("schedule", schedule, Schedule, "a Schedule", error=ScheduleError)
    _check_membership(schedule)
    _check_complete(schedule)
    _check_order(schedule)
    for rank, row in enumerate(schedule.actions):
        check_stage_actions(rank, row)
        check_waits(rank, row)
    check_pairing(schedule)
    check_progress(schedule)
    return Report(
        peak_activations=tuple(map(_peak, schedule.actions)),
        messages=sum(a.kind in SENDS for row in schedule.actions for a in row),
    )


def _flat(row: tuple[Action, ...]) -> Iterator[tuple[int, Action]]:
    for index, action in enumerate(row):
        for part in action.flat:
            yield index, part


def _check_membership(schedule: Schedule) -> None:
    for rank, row in enumerate(schedule.actions):
        for index, action in _flat(row):
            context = f"{action} (rank {rank}, action {index})"
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError(
                    f"{context}: stage {action.stage} does not exist; the schedule has"
                    f" {schedule.stages} stages"
                )
            if schedule.placement[action.stage] != rank:
                raise ScheduleError(
                    f"{context}: stage {action.stage} is on rank "
                    f"{schedule.placement[action.stage]}; move the action there"
                )
            if action.microbatch >= schedule.microbatches:
                raise ScheduleError(
                    f"{context}: microbatch {action.microbatch} does not exist; the step has"
                    f" {schedule.microbatches}"
                )


def _required(schedule: Schedule, stage: int, microbatch: int, split: bool) -> list[Action]:
    """List the actions that (stage, microbatch) must have exactly once."""
    required_kinds = [_F, _I, _W] if split else [_F, _B]
    if stage + 1 < schedule.stages and schedule.placement[stage + 1] != schedule.placement[stage]:
        # Messages exist only between stages on different ranks.
        required_kinds += [Kind.SEND_FORWARD, Kind.RECV_BACKWARD]
    if stage > 0 and schedule.placement[stage - 1] != schedule.placement[stage]:
        required_kinds += [Kind.RECV_FORWARD, Kind.SEND_BACKWARD]
    return [Action(required_kind, stage, microbatch) for required_kind in required_kinds]


def _count_error(action: Action, count: int, rank: int) -> str:
    problem = "is missing" if count == 0 else f"occurs {count} times"
    return (
        f"{action} {problem} on rank {rank}; every stage must run each of its actions once per "
        "microbatch"
    )


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(action for row in schedule.actions for _, action in _flat(row))
    for action, count in counts.items():
        # A repeated computation also repeats its messages, so report the computation.
        if count > 1 and action.kind in (_F, _I, _W, _B):
            raise ScheduleError(_count_error(action, count, schedule.placement[action.stage]))
    for microbatch in range(schedule.microbatches):
        for stage in range(schedule.stages):
            rank = schedule.placement[stage]
            split = bool(
                counts[Action(_I, stage, microbatch)] or counts[Action(_W, stage, microbatch)]
            )
            if split and counts[Action(_B, stage, microbatch)]:
                raise ScheduleError(
                    f"microbatch {microbatch} has two backwards on stage {stage} on rank {rank}: a "
                    "full B, and I or W; keep either the B, or I and W"
                )
            for action in _required(schedule, stage, microbatch, split):
                count = counts[action]
                if count != 1:
                    raise ScheduleError(_count_error(action, count, rank))
                del counts[action]
    for action in counts:
        if action.kind in SENDS | RECEIVES:
            raise ScheduleError(
                f"{action} on rank {schedule.placement[action.stage]} is unused: no other rank "
                "produces or needs this message; remove it"
            )


def _dependencies(schedule: Schedule, action: Action, full: bool) -> list[Action]:
    """Actions that must come earlier in the same row; `full`: the backward is not split."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    backward_kind = _B if full else _I
    own_kind = {
        _W: _I,
        _B: _F,
        _I: _F,
        Kind.SEND_FORWARD: _F,
        Kind.SEND_BACKWARD: backward_kind,
    }.get(kind)
    dependencies = [] if own_kind is None else [Action(own_kind, stage, microbatch)]
    for is_gradient, source, _ in sources(action, schedule.stages):
        if schedule.placement[source] == schedule.placement[stage]:
            # A neighboring stage on the same rank may split its backward or not.
            dependencies.append(Action(_I if is_gradient else _F, source, microbatch))
        else:
            received = Kind.RECV_BACKWARD if is_gradient else Kind.RECV_FORWARD
            dependencies.append(Action(received, stage, microbatch))
    return dependencies


def _check_order(schedule: Schedule) -> None:
    failures = [
        failure
        for rank, row in enumerate(schedule.actions)
        for failure in _disorder(schedule, rank, row)
    ]
    if failures:
        raise ScheduleError(min(failures)[2])


def _disorder(
    schedule: Schedule, rank: int, row: tuple[Action, ...]
) -> Iterator[tuple[int, int, str]]:
    """Yield each dependency in the wrong order, as (microbatch, stage, message)."""
    position: dict[Action, int] = {}
    unsplit: set[tuple[int, int]] = set()
    for index, action in _flat(row):
        position[action] = index
        if action.kind is _B:
            unsplit.add((action.stage, action.microbatch))
            # A full backward also provides the input gradient.
            position[action._replace(kind=_I)] = index
    for index, action in _flat(row):
        context = f"{action} (rank {rank}, action {index})"
        for dependency in _dependencies(
            schedule, action, (action.stage, action.microbatch) in unsplit
        ):
            if position[dependency] >= index:
                text = (
                    f"{context} comes before {dependency} (action {position[dependency]}), which"
                    " it depends on; swap them"
                )
                yield action.microbatch, action.stage, text


def _peak(row: tuple[Action, ...]) -> int:
    live = peak = 0
    for action in row:
        # During an overlap, the activations of its forward and its backward are both live.
        live += sum(part.kind is _F for part in action.computations)
        peak = max(peak, live)
        live -= sum(part.kind in (_B, _W) for part in action.computations)
    return peak
