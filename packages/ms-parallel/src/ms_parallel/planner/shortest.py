"""The shortest schedule for measured costs over all placements; pure, without processes."""

from collections.abc import Mapping, Sequence

from ms_parallel.errors import ScheduleError
from ms_parallel.planner.found_schedule import FoundSchedule
from ms_parallel.schedules.generators.one_stage.one_f_one_b import one_f_one_b
from ms_parallel.schedules.solver.balance import Balanced, balance, split_by_work
from ms_parallel.schedules.table.placements import looped, one_a_rank, vee
from ms_parallel.schedules.table.segments import SegmentCosts
from ms_parallel.schedules.timeline.simulate import Timeline, simulate
from ms_parallel.split.stages import cut_layers

PER_MS = 1000
"""Measured times are whole microseconds."""
EFFORT = 0.5


def shortest_schedule(
    costs: SegmentCosts,
    ranks: int,
    microbatches: int,
    memory_cap_bytes: int | Sequence[int] | None,
    *,
    conditions: Mapping[str, int | str | None],
    split: bool = True,
    effort: float = EFFORT,
) -> FoundSchedule:
    """Find the shortest of the schedules on all placements; the same for the same costs.

    Args:
        costs: measured, in microseconds and bytes.
        ranks: of the pipeline.
        microbatches: of one step.
        memory_cap_bytes: most activation memory of a rank, or of each; None for as much as 1F1B
            takes, with layers shared out by work where ranks are unlike.
        conditions: what the costs were measured for; kept with the schedule.
        split: whether backwards of inputs and of weights may be apart.
        effort: of the search; 1 is some seconds.

    Raises:
        ScheduleError: the cap is below the least that works.
    """
    plain = _plain(costs, ranks, microbatches)
    cap = _cap(memory_cap_bytes, costs, ranks, microbatches)
    placements = [one_a_rank(ranks), vee(ranks), looped(ranks, 2)][: 3 if ranks > 1 else 1]
    tried: list[Balanced] = []
    refusals: list[Exception] = []
    for placement in placements:
        if len(placement) > costs.count:
            continue
        try:
            tried.append(
                balance(
                    costs,
                    cap,
                    placement=placement,
                    microbatches=microbatches,
                    split=split,
                    effort=effort / len(placements),
                )
            )
        except ScheduleError as refusal:
            refusals.append(refusal)
    if not tried:
        raise refusals[0]
    best = min(tried, key=lambda each: each.found.makespan)
    return FoundSchedule(
        conditions=dict(conditions),
        table=best.found.schedule.to_csv(),
        layers=costs.layers_of(best.split),
        makespan_ms=float(best.found.makespan) / PER_MS,
        lower_bound_ms=float(best.found.lower_bound) / PER_MS,
        one_f_one_b_ms=float(plain.makespan) / PER_MS,
        peak_bytes=tuple(map(int, best.found.peak_memory)),
        memory_cap_bytes=cap,
        costs=_facts(costs),
    )


def _plain(costs: SegmentCosts, ranks: int, microbatches: int) -> Timeline:
    """Simulate 1F1B with layers shared out as an engine does by default."""
    even = cut_layers(costs.count, ranks, range(costs.count))
    return simulate(
        one_f_one_b(ranks, microbatches),
        costs.stages([len(each) for each in even], one_a_rank(ranks)),
    )


def _cap(
    given: int | Sequence[int] | None, costs: SegmentCosts, ranks: int, microbatches: int
) -> int | tuple[int, ...]:
    """Return the memory that may be taken: as given, or as much as 1F1B takes."""
    if isinstance(given, Sequence):
        return tuple(given)
    return given or int(max(_usual(costs, ranks, microbatches).peak_memory))


def _usual(costs: SegmentCosts, ranks: int, microbatches: int) -> Timeline:
    """Simulate 1F1B as one would choose it: where ranks are unlike, fast ones have more layers."""
    if not costs.slowness:
        return _plain(costs, ranks, microbatches)
    placement = one_a_rank(ranks)
    split = split_by_work(costs, placement)
    return simulate(one_f_one_b(ranks, microbatches), costs.stages(split, placement))


def _facts(costs: SegmentCosts) -> dict[str, tuple[float, ...]]:
    """Return the costs as they stand in the file: milliseconds and bytes."""
    times = {
        "forward_ms": costs.forward,
        "backward_input_ms": costs.backward_input,
        "backward_weight_ms": costs.backward_weight,
        "latency_ms": [costs.latency],
        "transfer_ms": [costs.transfer],
    }
    sizes = {"activation_bytes": costs.activation, "retained_bytes": costs.retained}
    return {
        "rank_slowness": tuple(map(float, costs.slowness)),
        **{name: tuple(float(each) / PER_MS for each in values) for name, values in times.items()},
        **{name: tuple(map(float, values)) for name, values in sizes.items()},
    }
