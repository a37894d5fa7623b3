"""Time of a pipeline under a schedule, and the microbatches that are live at once."""

from collections.abc import Mapping, Sequence
from functools import cache

from attrs import evolve, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.memory.budget import peak_microbatches
from ms_parallel.schedules.generators.registry import GENERATORS, named_schedule
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import looped
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.simulate import simulate

SIMULATED_PER_RANK = 2
"""Microbatches per rank after which a schedule is periodic: each further one adds the work of the
busiest rank."""
MAX_RANKS = 8
"""Maximum ranks in estimates; larger pipelines are scaled from this size until the final round."""
LOOPED_STAGES = 2
"""Stages per rank of looped schedules."""
DIGITS = 9
"""Digits of seconds: times are whole nanoseconds, so that sums are exact."""


@frozen(kw_only=True)
class StageSeconds:
    """Times of a microbatch in each stage."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    message: float = 0.0
    """Seconds of a message between stages."""

    def work(self, stages: Sequence[int]) -> float:
        """Seconds that a rank with these stages computes per microbatch."""
        parts = (self.forward, self.backward_input, self.backward_weight)
        return sum(part[stage] for part in parts for stage in stages)

    def scaled(self, fraction: float) -> "StageSeconds":
        """Scale the work by a fraction; messages are unchanged."""
        parts = (self.forward, self.backward_input, self.backward_weight)
        forward, inputs, weights = (tuple(fraction * seconds for seconds in part) for part in parts)
        return evolve(self, forward=forward, backward_input=inputs, backward_weight=weights)


def simulated_microbatches(ranks: int, microbatches: int) -> int:
    """Number of microbatches to simulate."""
    return min(microbatches, SIMULATED_PER_RANK * ranks)


@cache
def table(name: str, ranks: int, microbatches: int) -> Schedule | str:
    """Return a named schedule, or the reason why it does not exist for these sizes."""
    try:
        return named_schedule(name, ranks, microbatches)
    except ScheduleError as error:
        return str(error)


@cache
def stage_ranks(name: str, ranks: int) -> tuple[int, ...]:
    """Pipeline rank of each stage, which does not depend on the number of microbatches."""
    placement = GENERATORS[name].placement
    return placement(ranks, LOOPED_STAGES) if placement is looped else placement(ranks)


@cache
def splits_backward(name: str) -> bool:
    """Return whether a schedule separates weight gradients from input gradients."""
    # Any size that all generators support will do.
    schedule = table(name, 2, 4)
    if isinstance(schedule, str):
        return False
    return any(
        action.kind is Kind.BACKWARD_INPUT for row in schedule.computations() for action in row
    )


@cache
def bubble_share(name: str, ranks: int, microbatches: int) -> float:
    """Bubble as a fraction of the computing time, for equal stages.

    Forward, input backward and weight backward take equally long. Microbatches beyond the simulated
    ones add work but no bubble, and the bubble of more than `MAX_RANKS` ranks is scaled with the
    number of ranks minus 1.
    """
    small_ranks, count = _scaled(ranks, microbatches)
    schedule = table(name, small_ranks, count)
    assert isinstance(schedule, Schedule), schedule
    timeline = simulate(schedule, Costs.uniform(schedule.stages))
    # In units of one microbatch's work on a rank.
    bubble = float(timeline.lost / max(timeline.busy)) * schedule.microbatches
    if ranks > small_ranks:
        bubble *= (ranks - 1) / (small_ranks - 1)
    return bubble / microbatches


def refusal(name: str, ranks: int, microbatches: int) -> str | None:
    """Reason why a schedule does not exist, judged by a scaled pipeline; None if it does."""
    schedule = table(name, *_scaled(ranks, microbatches))
    return schedule if isinstance(schedule, str) else None


def _scaled(ranks: int, microbatches: int) -> tuple[int, int]:
    """Ranks and microbatches of the scaled pipeline that is simulated instead."""
    small_ranks = min(ranks, MAX_RANKS)
    # Rounded up; the number of microbatches per rank stays the same.
    return small_ranks, simulated_microbatches(small_ranks, -(-microbatches * small_ranks // ranks))


@cache
def makespan_s(name: str, ranks: int, microbatches: int, times: StageSeconds) -> float:
    """Predict the seconds from the first forward to the last backward.

    Args:
        name: schedule that exists for these sizes.
        ranks: pipeline ranks.
        microbatches: microbatches per step; only `SIMULATED_PER_RANK` per rank are simulated.
        times: times of each stage.
    """
    count = simulated_microbatches(ranks, microbatches)
    schedule = table(name, ranks, count)
    assert isinstance(schedule, Schedule), schedule
    costs = Costs(
        forward=[round(seconds, DIGITS) for seconds in times.forward],
        backward_input=[round(seconds, DIGITS) for seconds in times.backward_input],
        backward_weight=[round(seconds, DIGITS) for seconds in times.backward_weight],
        latency=round(times.message, DIGITS),
    )
    busiest = max(times.work(schedule.stages_of(rank)) for rank in range(ranks))
    return float(simulate(schedule, costs).makespan) + (microbatches - count) * busiest


@cache
def live_microbatches(
    name: str, ranks: int, microbatches: int
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Live microbatches of each stage when the total on its rank is highest.

    Returns:
        Pairs (stage, microbatches) for each rank; for more than `MAX_RANKS` ranks these are scaled
        from a smaller pipeline.
    """
    small_ranks, count = _scaled(ranks, microbatches)
    # The live count may grow with the microbatches, as in GPipe: extrapolate the last growth.
    live, earlier = _peak_live(name, small_ranks, count), None
    remaining = microbatches * small_ranks / ranks - count
    if remaining > 0 and not isinstance(table(name, small_ranks, count - small_ranks), str):
        earlier = _peak_live(name, small_ranks, count - small_ranks)
    ranks_by_stage = stage_ranks(name, ranks)
    result = []
    for rank in range(ranks):
        small_rank = rank * small_ranks // ranks
        counts, extra = live[small_rank], 0.0
        if earlier is not None:
            # `growth` is for `small_ranks` more microbatches on all stages of the rank.
            growth = sum(counts.values()) - sum(earlier[small_rank].values())
            extra = growth / small_ranks * remaining / len(counts)
        # A longer pipeline has proportionally more microbatches in flight.
        scaled_counts = [
            (live_count + extra) * ranks / small_ranks for live_count in counts.values()
        ]
        stages = [stage for stage, stage_rank in enumerate(ranks_by_stage) if stage_rank == rank]
        result.append(tuple(zip(stages, scaled_counts, strict=True)))
    return tuple(result)


def _peak_live(name: str, ranks: int, microbatches: int) -> list[dict[int, int]]:
    schedule = table(name, ranks, microbatches)
    assert isinstance(schedule, Schedule), schedule
    return [max(peak_microbatches(row), key=_total) for row in schedule.actions]


def _total(counts: Mapping[int, int]) -> int:
    return sum(counts.values())
