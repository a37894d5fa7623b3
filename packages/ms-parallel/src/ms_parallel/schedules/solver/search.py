"""Searches for the shortest schedule under a memory cap, with a lower bound on the makespan."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from numbers import Integral

from attrs import evolve, frozen

from ms_parallel.arguments import check_integer, check_items, check_number, check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.list_scheduler import arrange
from ms_parallel.schedules.construction.policies import keep_order
from ms_parallel.schedules.construction.portfolio import best
from ms_parallel.schedules.construction.problem import (
    Arrangement,
    Operation,
    Problem,
    Rows,
    problem_of,
)
from ms_parallel.schedules.construction.tabulate import tabulate
from ms_parallel.schedules.generators.registry import GENERATORS
from ms_parallel.schedules.solver.annealing import COOL, WARM, anneal_blocks, anneal_order
from ms_parallel.schedules.solver.bounds import lower_bound
from ms_parallel.schedules.solver.exact import prove
from ms_parallel.schedules.solver.row_simulator import simulate_rows
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.costs import Costs, Number
from ms_parallel.schedules.table.placements import looped, one_a_rank, ranks_of, vee
from ms_parallel.schedules.table.schedule import Schedule, check_size
from ms_parallel.schedules.timeline.simulate import simulate

_BUDGET = 1_200_000
"""Actions scheduled at effort 1, over all trials; about 3 s on one core."""
_WALK = 2
"""Budget of a walk over orders, as a multiple; an action costs it a tenth."""
_SMALL = 4_000
"""Maximum actions for which fractions of the cap are tried too."""
_MAX_SEEDED = 40_000
"""Maximum actions for which handcrafted schedules are tried too."""


@frozen(kw_only=True)
class Found:
    """Result of `search`."""

    schedule: Schedule
    makespan: Fraction
    """Makespan by `simulate` with the given costs."""
    lower_bound: Fraction
    """Lower bound on the makespan over all placements that were tried."""
    peak_memory: tuple[Fraction, ...]
    """Peak activation memory of each rank, in the unit of the costs."""

    @property
    def gap(self) -> Fraction:
        """Relative distance of the makespan from the lower bound."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else Fraction(0)

    @property
    def proved(self) -> bool:
        """Whether the schedule is optimal."""
        return self.makespan == self.lower_bound


def search(
    costs: Costs,
    memory_cap: Number | Sequence[Number] | None = None,
    *,
    microbatches: int,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    split: bool = True,
    exact_search: bool = False,
    seed: int = 0,
    effort: float = 1.0,
) -> Found:
    """Search for the schedule with the smallest makespan whose activations fit under the cap.

    The result depends only on the arguments, not on the machine or its load. Without
    `exact_search` its makespan never exceeds the makespan of the same search under a smaller cap of
    1, 2, 4, ... times the minimum. Under other smaller caps the search may happen to find a shorter
    schedule, by at most the `gap` of this one.

    Args:
        costs: costs of every stage, in the order of the model.
        memory_cap: activation memory limit of every rank, or one per rank; None for no limit.
        microbatches: microbatches per step.
        ranks: pipeline ranks, by default one per stage. With more stages than ranks the looped
            placement and, for two stages per rank, the V are tried.
        placement: rank of each stage, instead of `ranks`.
        split: allow input and weight backwards to be separate.
        exact_search: continue with OR-tools (extra `search`) to an optimum or a better bound;
            feasible for up to some hundred actions.
        seed: seed of the random walks.
        effort: relative time to spend; 1 is a few seconds.

    Raises:
        ScheduleError: the cap is too small (names the minimum), sizes do not fit, or OR-tools is
            needed and not installed.
    """
    check_type("costs", costs, Costs, "Costs", error=ScheduleError)
    check_integer("ranks", ranks, minimum=1, error=ScheduleError, optional=True)
    check_number("effort", effort, minimum=0, error=ScheduleError)
    if placement is not None:
        check_items("placement", placement, Integral, "ranks of stages", error=ScheduleError)
    check_size(costs.stages, microbatches)
    problems, errors = [], []
    for stage_placement in _placements(costs.stages, ranks, placement):
        try:
            problems.append(problem_of(costs, memory_cap, microbatches, stage_placement, split))
        except ScheduleError as error:
            errors.append(error)
    if not problems:
        raise errors[0]
    # Lower bounds are in ticks, one per placement.
    budget, lowers = int(_BUDGET * effort), list(map(lower_bound, problems))
    index, arrangement = _best_at(dict(enumerate(problems)), dict(enumerate(lowers)), budget, seed)
    # A tighter cap can lead to a shorter schedule; stop at a proven optimum.
    for tighter in _tighter(problems):
        if arrangement.makespan == min(lowers):
            break
        tighter_lowers = {
            candidate_index: lower_bound(problem) for candidate_index, problem in tighter.items()
        }
        # Skip caps under which no schedule can beat the best one.
        if min(tighter_lowers.values()) < arrangement.makespan:
            candidate_index, candidate = _best_at(tighter, tighter_lowers, budget, seed)
            if candidate.makespan < arrangement.makespan:
                index, arrangement = candidate_index, candidate
    problem, rows = problems[index], arrangement.rows
    if exact_search and lowers[index] < arrangement.makespan:
        proof = prove(problem, arrangement, lowers[index], seed=seed, effort=20 * effort)
        rows, lowers[index] = _shorter(problem, arrangement, proof.rows), proof.lower_bound
    return _finish(problem, costs, rows, min(lowers))


def _placements(
    stages: int, ranks: int | None, placement: Sequence[int] | None
) -> list[tuple[int, ...]]:
    if placement is not None:
        used_ranks = ranks_of(placement)
        if len(placement) != stages or (ranks is not None and ranks != used_ranks):
            raise ScheduleError(
                f"placement must have {stages} stages on {ranks or used_ranks} ranks, as the "
                f"costs do, got {len(placement)} stages on {used_ranks}; pass the rank of every "
                "stage"
            )
        return [tuple(placement)]
    ranks = stages if ranks is None else ranks
    if ranks < 1 or stages % ranks:
        raise ScheduleError(
            f"{stages} stages do not divide evenly over {ranks} ranks; use a number of ranks that"
            " divides them, or pass a placement"
        )
    if ranks == stages or ranks == 1:
        return [one_a_rank(ranks) if ranks > 1 or stages == 1 else looped(1, stages)]
    loops = [looped(ranks, stages // ranks)]
    # Two stages per rank also fit on a V.
    return [vee(ranks), *loops] if stages == 2 * ranks else loops


def _best_at(
    problems: Mapping[int, Problem], lowers: Mapping[int, int], budget: int, seed: int
) -> tuple[int, Arrangement]:
    """Best arrangement for these caps, and the index of its problem."""
    constructed = {
        number: _constructed(problem, budget // len(problems))
        for number, problem in problems.items()
    }
    index = min(constructed, key=lambda number: constructed[number][0].makespan)
    return index, _refined(problems[index], *constructed[index], lowers[index], budget, seed)


def _tighter(problems: Sequence[Problem]) -> Iterator[dict[int, Problem]]:
    """Yield the problems with tighter and tighter caps, as these may give better results.

    Free memory tempts the list scheduler to run ahead. The caps are the minimum for all ranks times
    powers of two, independent of the requested cap, so that every larger cap tries them too.
    """
    minimums = [max(map(problem.min_memory, range(problem.ranks))) for problem in problems]
    maximum = max(max(problem.caps) for problem in problems)
    caps = [min(minimums)]
    # Powers of two times the minimum, below the largest requested cap.
    while 0 < 2 * caps[-1] < maximum:
        caps.append(2 * caps[-1])
    for cap in reversed(caps):
        if cap < maximum:
            yield {
                index: evolve(problem, caps=[min(rank_cap, cap) for rank_cap in problem.caps])
                for index, problem in enumerate(problems)
                if minimums[index] <= cap
            }


def _constructed(problem: Problem, budget: int) -> tuple[Arrangement, Arrangement]:
    """Best arrangement overall, and the best that keeps a handcrafted order (or the former)."""
    shortest, seeded = best(problem, budget), None
    # Small problems can afford to try tighter caps here as well.
    if problem.actions <= _SMALL:
        for fraction in (Fraction(5, 6), Fraction(1, 2)):
            caps = [
                max(problem.min_memory(rank), int(cap * fraction))
                for rank, cap in enumerate(problem.caps)
            ]
            tighter = best(evolve(problem, caps=caps), budget)
            shortest = min(shortest, tighter, key=lambda arrangement: arrangement.makespan)
    for order in _seeds(problem):
        with suppress(ScheduleError):
            ordered = arrange(problem, keep_order(problem, order))
            seeded = min(seeded or ordered, ordered, key=lambda arrangement: arrangement.makespan)
    if seeded is None:
        return shortest, shortest
    return min(shortest, seeded, key=lambda arrangement: arrangement.makespan), seeded


def _refined(
    problem: Problem,
    shortest: Arrangement,
    seeded: Arrangement,
    lower: int,
    budget: int,
    seed: int,
) -> Arrangement:
    """Anneal the block delays, then the best arrangement and the best handcrafted one."""
    # Worthwhile only if the budget allows a hundred blocks or more.
    if shortest.makespan > lower and 3 * problem.ticks.stages * 100 < budget // 4:
        shortest = anneal_blocks(problem, shortest, budget // 4, seed)
    # From the best arrangement warm and cool, and from the best handcrafted order cool.
    for start, temperatures in ((shortest, WARM), (shortest, COOL), (seeded, COOL)):
        if shortest.makespan > lower:
            walked = anneal_order(problem, start, _WALK * budget, seed, temperatures)
            shortest = min(shortest, walked, key=lambda arrangement: arrangement.makespan)
    return shortest


def _seeds(problem: Problem) -> list[list[list[Operation]]]:
    """Orders of forwards and input backwards of the handcrafted schedules for this placement."""
    if problem.actions > _MAX_SEEDED:
        return []
    # Weight backwards are left out, as the list scheduler places them again.
    kinds = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1}
    schedules = (
        generator.start(problem.placement, problem.microbatches)
        for generator in GENERATORS.values()
    )
    return [
        [
            [(kinds[a.kind], a.stage, a.microbatch) for a in row if a.kind in kinds]
            for row in schedule.computations()
        ]
        for schedule in schedules
        if schedule is not None
    ]


def _shorter(problem: Problem, incumbent: Arrangement, rows: Rows | None) -> Rows:
    """Return the shorter of two by the true costs, as the solver used rounded ones."""
    if rows is None:
        return incumbent.rows
    # The solver rounds costs down, so time its rows with the true ones.
    starts = simulate_rows(problem, rows)
    end = max(start + problem.lengths[phase][stage] for (phase, stage, _), start in starts.items())
    return rows if end < incumbent.makespan else incumbent.rows


def _finish(problem: Problem, costs: Costs, rows: Rows, lower: int) -> Found:
    schedule = tabulate(problem, rows, "search")
    line = simulate(schedule, costs)
    return Found(
        schedule=schedule,
        makespan=line.makespan,
        lower_bound=Fraction(lower, problem.ticks.per_unit),
        peak_memory=line.peak_memory,
    )
