"""The timeline of a real run, and the costs that explain it.

Times are for each rank (start, end) of each forward and backward in order, the two of an overlapped
pair apart, all on one clock.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from attrs import evolve

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.costs import Costs, Number, as_fraction
from ms_parallel.schedules.table.playback import Span, results, sources
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.simulate import Timeline, peak_memory

Times = Sequence[Sequence[tuple[Number, Number]]]
_Timed = tuple[Action, Fraction, Fraction]


def measured(schedule: Schedule, times: Times, costs: Costs | None = None) -> Timeline:
    """Make the timeline of a real run, to be held against a simulated one.

    Args:
        schedule: What was run.
        times: As above; the first start of all becomes 0.
        costs: Where the memory of activations comes from; default one a microbatch and stage.

    Raises:
        ScheduleError: The times are not those of this schedule.
    """
    timed = _timed(schedule, times)
    flat = [time for row in timed for _, start, end in row for time in (start, end)]
    per_unit, first = lcm(*(time.denominator for time in flat)), min(flat)
    spans: list[list[Span]] = []
    for row, computations in zip(timed, schedule.computations(), strict=True):
        left = iter(row)
        spans.append([])
        for action in computations:
            own = [next(left) for _ in action.computations]
            start, end = (int((at - first) * per_unit) for at in (own[0][1], own[-1][2]))
            spans[-1].append(Span(action, start, end, None))
    ticks = (costs or Costs.uniform(schedule.stages)).ticks()
    return Timeline(
        schedule=schedule,
        ticks=evolve(ticks, per_unit=per_unit),
        spans=_with_causes(spans, schedule.stages),
        peak_memory=peak_memory(schedule, ticks),
    )


def _with_causes(spans: Sequence[Sequence[Span]], stages: int) -> tuple[tuple[Span, ...], ...]:
    """Give each span its cause: what ended last of all that it waited for."""
    made_at = {
        result: (rank, index)
        for rank, row in enumerate(spans)
        for index, span in enumerate(row)
        for result in results(span.action)
    }

    def cause(rank: int, index: int) -> tuple[int, int] | None:
        action = spans[rank][index].action
        needs = [made_at[each] for part in action.computations for each in sources(part, stages)]
        needs += [(rank, index - 1)] if index else []
        return max(needs, key=lambda at: spans[at[0]][at[1]].end, default=None)

    return tuple(
        tuple(span._replace(cause=cause(rank, index)) for index, span in enumerate(row))
        for rank, row in enumerate(spans)
    )


def measured_costs(schedule: Schedule, times: Times) -> Costs:
    """Take the mean time of each stage's passes, and of the messages that a rank waited for.

    A backward that was never split counts as one of inputs alone.

    Raises:
        ScheduleError: The times are not those of this schedule.
    """
    timed = _timed(schedule, times)
    lengths: dict[tuple[Kind, int], list[Fraction]] = {}
    for row in timed:
        for action, start, end in row:
            lengths.setdefault((action.kind, action.stage), []).append(as_fraction(end - start))

    def means(*kinds: Kind) -> list[Fraction]:
        """Average each stage's passes of the first of these kinds that it has."""
        return [
            next(
                (_mean(lengths[kind, stage]) for kind in kinds if (kind, stage) in lengths),
                Fraction(0),
            )
            for stage in range(schedule.stages)
        ]

    return Costs(
        forward=means(Kind.FORWARD),
        backward_input=means(Kind.BACKWARD_INPUT, Kind.BACKWARD),
        backward_weight=means(Kind.BACKWARD_WEIGHT),
        latency=_latency(schedule, timed),
    )


def _mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values) if values else Fraction(0)


def _timed(schedule: Schedule, times: Times) -> list[list[_Timed]]:
    rows = [[p for a in row for p in a.computations] for row in schedule.computations()]
    if [len(row) for row in rows] != [len(row) for row in times]:
        raise ScheduleError(
            f"measured {[len(row) for row in times]} computations a rank, but the schedule has "
            f"{[len(row) for row in rows]}; measure every one of them"
        )
    return [
        [
            (action, as_fraction(a), as_fraction(b))
            for action, (a, b) in zip(row, spans, strict=True)
        ]
        for row, spans in zip(rows, times, strict=True)
    ]


def _latency(schedule: Schedule, timed: Sequence[Sequence[_Timed]]) -> Fraction:
    """Average the time from a computation's end to the start of one that stood waiting for it."""
    ended = {result: end for row in timed for action, _, end in row for result in results(action)}
    gaps = []
    for row in timed:
        for index, (action, start, _) in enumerate(row):
            free = row[index - 1][2] if index else Fraction(0)
            for source in sources(action, schedule.stages):
                far = schedule.placement[source[1]] != schedule.placement[action.stage]
                if far and free <= ended[source] <= start:
                    gaps.append(start - ended[source])
    return _mean(gaps)
