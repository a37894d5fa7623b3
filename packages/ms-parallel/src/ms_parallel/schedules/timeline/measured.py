"""What a run's own times say: its timeline, and the costs that explain it.

Times are for each rank (start, end) of each forward and backward in order, the two of an overlapped
pair apart, all on one clock.
"""

from collections.abc import Sequence
from fractions import Fraction

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.communication import sources
from ms_parallel.schedules.table.costs import Costs, Number, exact
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.simulate import Timeline, measured

__all__ = ["Times", "observed", "observed_costs"]

Times = Sequence[Sequence[tuple[Number, Number]]]


def observed(schedule: Schedule, times: Times, costs: Costs | None = None) -> Timeline:
    """The timeline of a real run.

    Args:
        schedule: What was run.
        times: As above.
        costs: Where the memory of activations comes from; default one a microbatch and stage.

    Raises:
        ScheduleError: The times are not those of this schedule.
    """
    rows = []
    for rank, each in enumerate(_by_rank(schedule, times)):
        left = iter(each)
        row = []
        for action in schedule.computations()[rank]:
            spans = [next(left) for _ in action.computations]
            if spans:
                row.append((spans[0][1], spans[-1][2]))
        rows.append(row)
    return measured(schedule, rows, costs)


def observed_costs(schedule: Schedule, times: Times) -> Costs:
    """The mean time of each stage's passes, and of the messages that a rank waited for.

    A backward that was never split counts as one of inputs alone.

    Raises:
        ScheduleError: The times are not those of this schedule.
    """
    parts = _by_rank(schedule, times)
    found: dict[tuple[Kind, int], list[Fraction]] = {}
    for row in parts:
        for action, start, end in row:
            found.setdefault((action.kind, action.stage), []).append(exact(end - start))

    def mean(kind: Kind, stage: int) -> Fraction | None:
        lengths = found.get((kind, stage))
        return sum(lengths, Fraction(0)) / len(lengths) if lengths else None

    stages = range(schedule.stages)
    inputs = [mean(Kind.BACKWARD_INPUT, stage) or mean(Kind.BACKWARD, stage) for stage in stages]
    return Costs(
        forward=[mean(Kind.FORWARD, stage) or 0 for stage in stages],
        backward_input=[time or 0 for time in inputs],
        backward_weight=[mean(Kind.BACKWARD_WEIGHT, stage) or 0 for stage in stages],
        latency=_latency(schedule, parts),
    )


_Parts = list[list[tuple[Action, Fraction, Fraction]]]


def _by_rank(schedule: Schedule, times: Times) -> _Parts:
    rows = [[p for a in row for p in a.computations] for row in schedule.computations()]
    if [len(row) for row in rows] != [len(row) for row in times]:
        raise ScheduleError(
            f"measured {[len(row) for row in times]} computations a rank, but the schedule has "
            f"{[len(row) for row in rows]}; measure every one of them"
        )
    return [
        [(action, exact(a), exact(b)) for action, (a, b) in zip(row, spans, strict=True)]
        for row, spans in zip(rows, times, strict=True)
    ]


def _latency(schedule: Schedule, parts: _Parts) -> Fraction:
    """Mean time from the end of a computation to the start of one that stood waiting for it."""
    ended = {
        (a.kind is not Kind.FORWARD, a.stage, a.microbatch): end
        for row in parts
        for a, _, end in row
        if a.kind is not Kind.BACKWARD_WEIGHT
    }
    gaps = []
    for row in parts:
        for index, (action, start, _) in enumerate(row):
            free = row[index - 1][2] if index else Fraction(0)
            for source in sources(action, schedule.stages):
                far = schedule.placement[source[1]] != schedule.placement[action.stage]
                if far and free <= ended[source] <= start:
                    gaps.append(start - ended[source])
    return sum(gaps, Fraction(0)) / len(gaps) if gaps else Fraction(0)
