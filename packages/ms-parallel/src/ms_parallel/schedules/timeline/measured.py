"""Timeline of a real run, and the costs that explain it.

Times are (start, end) of each forward and backward per rank, in order and on one clock; the two
computations of a pair are separate.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from attrs import evolve

from ms_parallel.arguments import check_items, check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.table.action import Action, Kind
from ms_parallel.schedules.table.costs import Costs, Number, as_fraction
from ms_parallel.schedules.table.event_simulation import Span, results, sources
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.simulate import Timeline, peak_memory

Times = Sequence[Sequence[tuple[Number, Number]]]
_TimedAction = tuple[Action, Fraction, Fraction]


def measured(schedule: Schedule, times: Times, costs: Costs | None = None) -> Timeline:
    """Build the timeline of a real run, for comparison with a simulated one.

    Args:
        schedule: the schedule that was run.
        times: times as described above; the first start becomes 0.
        costs: source of the activation memory; by default 1 per microbatch and stage.

    Raises:
        ScheduleError: the times do not fit the schedule.
    """
    timed = _with_times(schedule, times)
    flat = [time for row in timed for _, start, end in row for time in (start, end)]
    # Ticks per unit: the least common denominator of all measured times.
    per_unit, first = lcm(*(time.denominator for time in flat)), min(flat)
    spans: list[list[Span]] = []
    for row, computations in zip(timed, schedule.computations(), strict=True):
        remaining = iter(row)
        spans.append([])
        for action in computations:
            # A pair is one span, from the start of its first part to the end of its second.
            parts = [next(remaining) for _ in action.computations]
            start, end = (int((time - first) * per_unit) for time in (parts[0][1], parts[-1][2]))
            spans[-1].append(Span(action, start, end, None))
    ticks = (costs or Costs.uniform(schedule.stages)).ticks()
    return Timeline(
        schedule=schedule,
        ticks=evolve(ticks, per_unit=per_unit),
        spans=_with_causes(spans, schedule.stages),
        peak_memory=peak_memory(schedule, ticks),
    )


def _with_causes(spans: Sequence[Sequence[Span]], stages: int) -> tuple[tuple[Span, ...], ...]:
    """Set each span's cause: the last to end among the spans it waited for."""
    span_of = {
        result: (rank, index)
        for rank, row in enumerate(spans)
        for index, span in enumerate(row)
        for result in results(span.action)
    }

    def cause(rank: int, index: int) -> tuple[int, int] | None:
        action = spans[rank][index].action
        candidates = [
            span_of[source] for part in action.computations for source in sources(part, stages)
        ]
        candidates += [(rank, index - 1)] if index else []
        return max(
            candidates, key=lambda index_pair: spans[index_pair[0]][index_pair[1]].end, default=None
        )

    return tuple(
        tuple(span._replace(cause=cause(rank, index)) for index, span in enumerate(row))
        for rank, row in enumerate(spans)
    )


def measured_costs(schedule: Schedule, times: Times) -> Costs:
    """Mean time of each stage's passes, and of the messages that a rank waited for.

    A backward that is never split counts as an input backward.

    Raises:
        ScheduleError: the times do not fit the schedule.
    """
    timed = _with_times(schedule, times)
    lengths: dict[tuple[Kind, int], list[Fraction]] = {}
    for row in timed:
        for action, start, end in row:
            lengths.setdefault((action.kind, action.stage), []).append(as_fraction(end - start))

    def means(*kinds: Kind) -> list[Fraction]:
        """Mean time of each stage's passes of the first of these kinds that it has."""
        return [
            next(
                (
                    _mean(lengths[pass_kind, stage])
                    for pass_kind in kinds
                    if (pass_kind, stage) in lengths
                ),
                Fraction(0),
            )
            for stage in range(schedule.stages)
        ]

    return Costs(
        forward=means(Kind.FORWARD),
        # An unsplit backward has no I, so its full time counts as the input backward.
        backward_input=means(Kind.BACKWARD_INPUT, Kind.BACKWARD),
        backward_weight=means(Kind.BACKWARD_WEIGHT),
        latency=_latency(schedule, timed),
    )


def _mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values) if values else Fraction(0)


def _with_times(schedule: Schedule, times: Times) -> list[list[_TimedAction]]:
    check_type("schedule", schedule, Schedule, "a Schedule", error=ScheduleError)
    check_items("times", times, Sequence, "lists of times, one list per rank", error=ScheduleError)
    rows = [[p for a in row for p in a.computations] for row in schedule.computations()]
    if [len(row) for row in rows] != [len(row) for row in times]:
        raise ScheduleError(
            f"measured {[len(row) for row in times]} computations per rank, but the schedule has "
            f"{[len(row) for row in rows]}; measure every computation"
        )
    return [
        [
            (action, as_fraction(a), as_fraction(b))
            for action, (a, b) in zip(row, spans, strict=True)
        ]
        for row, spans in zip(rows, times, strict=True)
    ]


def _latency(schedule: Schedule, timed: Sequence[Sequence[_TimedAction]]) -> Fraction:
    """Mean time from the end of a computation to the start of its waiting consumer."""
    end_of = {result: end for row in timed for action, _, end in row for result in results(action)}
    gaps = []
    for row in timed:
        for index, (action, start, _) in enumerate(row):
            rank_free = row[index - 1][2] if index else Fraction(0)
            for source in sources(action, schedule.stages):
                crosses_ranks = schedule.placement[source[1]] != schedule.placement[action.stage]
                # Only if the rank was already idle when its input was computed: then the gap is the
                # message.
                if crosses_ranks and rank_free <= end_of[source] <= start:
                    gaps.append(start - end_of[source])
    return _mean(gaps)
