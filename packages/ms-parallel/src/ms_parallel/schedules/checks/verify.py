"""Proves that a schedule computes the right thing and ends, before a process is started.

The transport assumed is the strictest: a rank performs one action at a time and stays in a send
until its peer stands at the matching receive. What ends under that ends under every transport
that keeps messages between two ranks in order.
"""

from collections import Counter
from collections.abc import Iterator

from attrs import frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.checks.messages import check_pairing, check_progress
from ms_parallel.schedules.checks.stage_actions import check_stage_actions, check_waits
from ms_parallel.schedules.table.action import RECEIVES, SENDS, Action, Kind
from ms_parallel.schedules.table.playback import sources
from ms_parallel.schedules.table.schedule import Schedule

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


@frozen(kw_only=True)
class Report:
    """What `verify` found in a schedule that is right."""

    peak_activations: tuple[int, ...]
    """For each rank the most pairs (stage, microbatch) whose activations live at once: from the
    forward to the end of the full backward or of the backward of weights."""
    messages: int
    """Activations and gradients that cross from one rank to another in a step."""


def verify(schedule: Schedule) -> Report:
    """Check completeness, order, pairing of messages and shards, and freedom from deadlock.

    Raises:
        ScheduleError: the first failing check, with the failure of the smallest microbatch and
            stage, or the shortest circle of ranks that wait for one another.
    """
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
            where = f"{action} (rank {rank}, action {index})"
            if not 0 <= action.stage < schedule.stages:
                raise ScheduleError(
                    f"{where}: there is no stage {action.stage}; the schedule has {schedule.stages}"
                )
            if schedule.placement[action.stage] != rank:
                raise ScheduleError(
                    f"{where}: stage {action.stage} lives on rank "
                    f"{schedule.placement[action.stage]}; move the action there"
                )
            if action.microbatch >= schedule.microbatches:
                raise ScheduleError(
                    f"{where}: there is no microbatch {action.microbatch}; "
                    f"the step has {schedule.microbatches}"
                )


def _required(schedule: Schedule, stage: int, microbatch: int, split: bool) -> list[Action]:
    """List every action that (stage, microbatch) must have, exactly once each."""
    kinds = [_F, _I, _W] if split else [_F, _B]
    if stage + 1 < schedule.stages and schedule.placement[stage + 1] != schedule.placement[stage]:
        kinds += [Kind.SEND_FORWARD, Kind.RECV_BACKWARD]
    if stage > 0 and schedule.placement[stage - 1] != schedule.placement[stage]:
        kinds += [Kind.RECV_FORWARD, Kind.SEND_BACKWARD]
    return [Action(kind, stage, microbatch) for kind in kinds]


def _miscounted(action: Action, count: int, rank: int) -> str:
    problem = "is missing" if count == 0 else f"occurs {count} times"
    return (
        f"{action} {problem} on rank {rank}; every stage does each of its actions on a "
        "microbatch once"
    )


def _check_complete(schedule: Schedule) -> None:
    counts = Counter(action for row in schedule.actions for _, action in _flat(row))
    for action, count in counts.items():
        # Its messages are repeated too where they were placed by the computations.
        if count > 1 and action.kind in (_F, _I, _W, _B):
            raise ScheduleError(_miscounted(action, count, schedule.placement[action.stage]))
    for microbatch in range(schedule.microbatches):
        for stage in range(schedule.stages):
            rank = schedule.placement[stage]
            split = bool(
                counts[Action(_I, stage, microbatch)] or counts[Action(_W, stage, microbatch)]
            )
            if split and counts[Action(_B, stage, microbatch)]:
                raise ScheduleError(
                    f"microbatch {microbatch} goes back through stage {stage} twice on rank "
                    f"{rank}: as a full B and as I or W; keep one of the two"
                )
            for action in _required(schedule, stage, microbatch, split):
                count = counts[action]
                if count != 1:
                    raise ScheduleError(_miscounted(action, count, rank))
                del counts[action]
    for action in counts:
        if action.kind in SENDS | RECEIVES:
            raise ScheduleError(
                f"{action} on rank {schedule.placement[action.stage]} has no use: no other rank "
                "produces or needs this message; remove it"
            )


def _needs(schedule: Schedule, action: Action, full: bool) -> list[Action]:
    """List what must stand earlier in the same row; `full`: the backward is not split."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    back = _B if full else _I
    same = {_W: _I, _B: _F, _I: _F, Kind.SEND_FORWARD: _F, Kind.SEND_BACKWARD: back}.get(kind)
    needs = [] if same is None else [Action(same, stage, microbatch)]
    for is_gradient, source, _ in sources(action, schedule.stages):
        if schedule.placement[source] == schedule.placement[stage]:
            # A neighbour on the same rank may split its backward or not.
            needs.append(Action(_I if is_gradient else _F, source, microbatch))
        else:
            received = Kind.RECV_BACKWARD if is_gradient else Kind.RECV_FORWARD
            needs.append(Action(received, stage, microbatch))
    return needs


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
    """Yield each dependency that stands the wrong way round, as (microbatch, stage, words)."""
    position: dict[Action, int] = {}
    full: set[tuple[int, int]] = set()
    for index, action in _flat(row):
        position[action] = index
        if action.kind is _B:
            full.add((action.stage, action.microbatch))
            position[action._replace(kind=_I)] = index
    for index, action in _flat(row):
        where = f"{action} (rank {rank}, action {index})"
        for need in _needs(schedule, action, (action.stage, action.microbatch) in full):
            if position[need] >= index:
                words = (
                    f"{where} comes before {need} (action {position[need]}), on which it depends; "
                    "swap them"
                )
                yield action.microbatch, action.stage, words


def _peak(row: tuple[Action, ...]) -> int:
    held = peak = 0
    for action in row:
        # An overlap holds what its forward makes while its backward still holds its own.
        held += sum(part.kind is _F for part in action.computations)
        peak = max(peak, held)
        held -= sum(part.kind in (_B, _W) for part in action.computations)
    return peak
