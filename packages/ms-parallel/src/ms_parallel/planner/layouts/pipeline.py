"""How long the stages of a pipeline take under a schedule, and what they hold at once."""

from collections.abc import Mapping, Sequence
from functools import cache

from attrs import evolve, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.generators.registry import GENERATORS, named_schedule
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.costs import Costs
from ms_parallel.schedules.table.placements import looped
from ms_parallel.schedules.table.schedule import Schedule
from ms_parallel.schedules.timeline.simulate import simulate
from ms_parallel.split.memory.budget import peak_microbatches

ENOUGH = 2
"""Microbatches a rank after which a schedule repeats itself: each further one takes what the
busiest rank works for it."""
FEW = 8
"""Ranks beyond which a pipeline is taken to be like one of so many, till it is among the best."""
ROUNDS = 2
"""Stages a rank of schedules that loop."""
DIGITS = 9
"""Digits of seconds; times are whole nanoseconds, so that sums are exact."""


@frozen(kw_only=True)
class StageSeconds:
    """What one microbatch takes in each stage."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    message: float = 0.0
    """Seconds of a message between stages."""

    def work(self, stages: Sequence[int]) -> float:
        """Return the seconds that a rank of these stages computes for a microbatch."""
        parts = (self.forward, self.backward_input, self.backward_weight)
        return sum(part[stage] for part in parts for stage in stages)

    def scaled(self, share: float) -> "StageSeconds":
        """Return the same with a share of the work, and messages as they are."""
        parts = (self.forward, self.backward_input, self.backward_weight)
        ahead, inputs, weights = (tuple(share * each for each in part) for part in parts)
        return evolve(self, forward=ahead, backward_input=inputs, backward_weight=weights)


def played(ranks: int, microbatches: int) -> int:
    """Return how many microbatches are played one by one."""
    return min(microbatches, ENOUGH * ranks)


@cache
def table(name: str, ranks: int, microbatches: int) -> Schedule | str:
    """Return a named schedule, or why there is none of these sizes."""
    try:
        return named_schedule(name, ranks, microbatches)
    except ScheduleError as error:
        return str(error)


@cache
def stage_ranks(name: str, ranks: int) -> tuple[int, ...]:
    """Return each stage's pipeline rank, whether or not some microbatches have a table."""
    place = GENERATORS[name].placement
    return place(ranks, ROUNDS) if place is looped else place(ranks)


@cache
def splits_backward(name: str) -> bool:
    """Return whether a schedule puts off gradients of weights behind those of inputs."""
    made = table(name, 2, 4)
    if isinstance(made, str):
        return False
    return any(action.kind is Kind.BACKWARD_INPUT for row in made.computations() for action in row)


@cache
def bubble_share(name: str, ranks: int, microbatches: int) -> float:
    """Time that a rank waits, as a share of that which it computes, where stages are alike.

    Its forwards and both parts of its backwards take as long. Microbatches beyond those that are
    played add work and no waiting; and a pipeline of more ranks than `FEW` waits as one of so many
    does, for each rank but one.
    """
    few, count = _scaled(ranks, microbatches)
    made = table(name, few, count)
    assert isinstance(made, Schedule), made
    line = simulate(made, Costs.uniform(made.stages))
    lost = float(line.lost / max(line.busy)) * made.microbatches
    if ranks > few:
        lost *= (ranks - 1) / (few - 1)
    return lost / microbatches


def refusal(name: str, ranks: int, microbatches: int) -> str | None:
    """Say why there is no such schedule, as far as one of `FEW` ranks tells; None if there is."""
    made = table(name, *_scaled(ranks, microbatches))
    return made if isinstance(made, str) else None


def _scaled(ranks: int, microbatches: int) -> tuple[int, int]:
    """Return the ranks and microbatches of the table that stands for one of so many."""
    few = min(ranks, FEW)
    return few, played(few, -(-microbatches * few // ranks))


@cache
def makespan_s(name: str, ranks: int, microbatches: int, times: StageSeconds) -> float:
    """Predict the seconds from the first forward to the last backward.

    Args:
        name: of a schedule that there is for these sizes.
        ranks: of the pipeline.
        microbatches: of an update; above `ENOUGH` a rank they are not played one by one.
        times: of each stage.
    """
    count = played(ranks, microbatches)
    made = table(name, ranks, count)
    assert isinstance(made, Schedule), made
    costs = Costs(
        forward=[round(each, DIGITS) for each in times.forward],
        backward_input=[round(each, DIGITS) for each in times.backward_input],
        backward_weight=[round(each, DIGITS) for each in times.backward_weight],
        latency=round(times.message, DIGITS),
    )
    busiest = max(times.work(made.stages_of(rank)) for rank in range(ranks))
    return float(simulate(made, costs).makespan) + (microbatches - count) * busiest


@cache
def held(name: str, ranks: int, microbatches: int) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Count the microbatches of each stage that each rank holds when it holds most of them all.

    Returns:
        Pairs (stage, microbatches) for each rank; of more ranks than `FEW` as of so many, with as
        many more microbatches.
    """
    few, count = _scaled(ranks, microbatches)
    last, before = _most_held(name, few, count), None
    beyond = microbatches * few / ranks - count
    if beyond > 0 and not isinstance(table(name, few, count - few), str):
        before = _most_held(name, few, count - few)
    homes = stage_ranks(name, ranks)
    found = []
    for rank in range(ranks):
        like = rank * few // ranks
        counts, more = last[like], 0.0
        if before is not None:
            grown = sum(counts.values()) - sum(before[like].values())
            more = grown / few * beyond / len(counts)
        each = [(one + more) * ranks / few for one in counts.values()]
        stages = [stage for stage, home in enumerate(homes) if home == rank]
        found.append(tuple(zip(stages, each, strict=True)))
    return tuple(found)


def _most_held(name: str, ranks: int, microbatches: int) -> list[dict[int, int]]:
    made = table(name, ranks, microbatches)
    assert isinstance(made, Schedule), made
    return [max(peak_microbatches(row), key=_all) for row in made.actions]


def _all(counts: Mapping[int, int]) -> int:
    return sum(counts.values())
