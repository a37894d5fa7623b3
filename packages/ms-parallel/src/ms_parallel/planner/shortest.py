"""Search for the shortest schedule over all placements, for measured costs; a pure function."""

from collections.abc import Mapping, Sequence

from ms_parallel.errors import ScheduleError
from ms_parallel.planner.searched_schedule import SearchedSchedule
from ms_parallel.schedules.generators.one_stage.one_f_one_b import one_f_one_b
from ms_parallel.schedules.solver.balance import Balanced, balance, split_by_work
from ms_parallel.schedules.table.placements import looped, one_a_rank, vee
from ms_parallel.schedules.table.segments import SegmentCosts
from ms_parallel.schedules.timeline.simulate import Timeline, simulate
from ms_parallel.split.stages import cut_layers

PER_MS = 1000
"""Microseconds, the unit of measured costs, per millisecond."""
EFFORT = 0.5
"""Default effort of the search."""


def shortest_schedule(
    costs: SegmentCosts,
    ranks: int,
    microbatches: int,
    memory_cap_bytes: int | Sequence[int] | None,
    *,
    conditions: Mapping[str, int | str | None],
    split: bool = True,
    effort: float = EFFORT,
) -> SearchedSchedule:
    """Find the schedule with the shortest makespan over all placements; deterministic.

    Args:
        costs: measured costs in microseconds and bytes.
        ranks: pipeline ranks.
        microbatches: microbatches per step.
        memory_cap_bytes: limit on the activations of every rank, or one limit per rank; None for
            the memory that 1F1B needs, with layers divided by work if ranks differ in speed.
        conditions: conditions of the measurement, stored with the schedule.
        split: allow separate input and weight backwards.
        effort: effort of the search; 1 takes some seconds.

    Raises:
        ScheduleError: the memory cap is too low for any schedule.
    """
    baseline = _even_one_f_one_b(costs, ranks, microbatches)
    cap = _cap(memory_cap_bytes, costs, ranks, microbatches)
    # One rank has one stage: cutting it further gains nothing.
    placements = [one_a_rank(ranks), vee(ranks), looped(ranks, 2)][: 3 if ranks > 1 else 1]
    results: list[Balanced] = []
    errors: list[Exception] = []
    for placement in placements:
        if len(placement) > costs.count:  # more stages than segments
            continue
        try:
            results.append(
                balance(
                    costs,
                    cap,
                    placement=placement,
                    microbatches=microbatches,
                    split=split,
                    effort=effort / len(placements),  # `effort` in total
                )
            )
        except ScheduleError as error:
            errors.append(error)
    if not results:
        raise errors[0]
    best = min(results, key=lambda result: result.found.makespan)
    return SearchedSchedule(
        conditions=dict(conditions),
        table=best.found.schedule.to_csv(),
        layers=costs.layers_of(best.split),
        makespan_ms=float(best.found.makespan) / PER_MS,
        lower_bound_ms=float(best.found.lower_bound) / PER_MS,
        one_f_one_b_ms=float(baseline.makespan) / PER_MS,
        peak_bytes=tuple(map(int, best.found.peak_memory)),
        memory_cap_bytes=cap,
        costs=_file_costs(costs),
    )


def _even_one_f_one_b(costs: SegmentCosts, ranks: int, microbatches: int) -> Timeline:
    """Simulate 1F1B with the engine's default layer split."""
    even = cut_layers(costs.count, ranks, range(costs.count))
    return simulate(
        one_f_one_b(ranks, microbatches),
        costs.stages([len(segments) for segments in even], one_a_rank(ranks)),
    )


def _cap(
    cap: int | Sequence[int] | None, costs: SegmentCosts, ranks: int, microbatches: int
) -> int | tuple[int, ...]:
    """Return the cap, or by default the memory that 1F1B needs."""
    if isinstance(cap, Sequence):
        return tuple(cap)
    # The same limit for all ranks, from the rank with the highest peak.
    return cap or int(max(_best_one_f_one_b(costs, ranks, microbatches).peak_memory))


def _best_one_f_one_b(costs: SegmentCosts, ranks: int, microbatches: int) -> Timeline:
    """Simulate 1F1B with more layers on faster ranks if ranks differ in speed."""
    if not costs.slowness:
        return _even_one_f_one_b(costs, ranks, microbatches)
    placement = one_a_rank(ranks)
    split = split_by_work(costs, placement)
    return simulate(one_f_one_b(ranks, microbatches), costs.stages(split, placement))


def _file_costs(costs: SegmentCosts) -> dict[str, tuple[float, ...]]:
    """Costs as stored in the file, in milliseconds and bytes."""
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
        **{name: tuple(float(value) / PER_MS for value in times[name]) for name in times},
        **{name: tuple(map(float, values)) for name, values in sizes.items()},
    }
