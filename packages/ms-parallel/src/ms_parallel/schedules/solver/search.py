"""Searches for the shortest schedule under a memory cap, and bounds how short one can be."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction

from attrs import evolve, frozen

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
from ms_parallel.schedules.solver.play import play_rows
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.costs import Costs, Number
from ms_parallel.schedules.table.placements import looped, one_a_rank, ranks_of, vee
from ms_parallel.schedules.table.schedule import Schedule, check_size
from ms_parallel.schedules.timeline.simulate import simulate

_BUDGET = 1_200_000
"""Actions scheduled at effort 1, over all trials; some 3 s on one core."""
_WALK = 2
"""Times the budget that a walk over orders takes; an action costs it a tenth."""
_FEW = 4_000
"""Actions up to which parts of the cap are tried too."""
_SEEDED = 40_000
"""Actions up to which the hand-made schedules are tried too."""


@frozen(kw_only=True)
class Found:
    """The best schedule that `search` found."""

    schedule: Schedule
    makespan: Fraction
    """As `simulate` finds it with the costs searched for."""
    lower_bound: Fraction
    """A makespan that no schedule can beat on any of the placements that were tried."""
    peak_memory: tuple[Fraction, ...]
    """For each rank, in the unit of the costs."""

    @property
    def gap(self) -> Fraction:
        """How far the makespan is above the lower bound, as a share of the bound."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else Fraction(0)

    @property
    def proved(self) -> bool:
        """Whether no schedule can be shorter."""
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
    """Search for the schedule of least makespan whose activations fit under the cap.

    The result depends on the arguments alone, not on the machine or its load. Without
    `exact_search` it is never longer than what the same search finds under a smaller cap that is
    the least that works, or twice, four times, ... as much. Under any other smaller cap the search
    may happen to find a schedule that is shorter, at most by the `gap` of this one.

    Args:
        costs: Of every stage, in the order of the model.
        memory_cap: Most activation memory of a rank, or of each; None for no limit.
        microbatches: Of one step.
        ranks: Ranks of the pipeline; default one a stage. With more stages than ranks both the
            loop and, for two stages a rank, the V are tried.
        placement: Rank of each stage, instead of `ranks`.
        split: Whether backwards of inputs and of weights may be apart.
        exact_search: Go on with OR-tools (extra `search`) to an optimum or a better bound; for
            some hundred actions at the most.
        seed: Of the random walks.
        effort: Time to spend; 1 is some seconds.

    Raises:
        ScheduleError: the cap is below the least that works, which is named; sizes that do not
            fit; or OR-tools is asked for and not installed.
    """
    check_size(costs.stages, microbatches)
    problems, refusals = [], []
    for places in _placements(costs.stages, ranks, placement):
        try:
            problems.append(problem_of(costs, memory_cap, microbatches, places, split))
        except ScheduleError as refusal:
            refusals.append(refusal)
    if not problems:
        raise refusals[0]
    budget, lowers = int(_BUDGET * effort), list(map(lower_bound, problems))
    index, arrangement = _best_at(dict(enumerate(problems)), dict(enumerate(lowers)), budget, seed)
    for tighter in _tighter(problems):
        if arrangement.makespan == min(lowers):
            break
        least = {place: lower_bound(problem) for place, problem in tighter.items()}
        if min(least.values()) < arrangement.makespan:
            place, found = _best_at(tighter, least, budget, seed)
            if found.makespan < arrangement.makespan:
                index, arrangement = place, found
    problem, rows = problems[index], arrangement.rows
    if exact_search and lowers[index] < arrangement.makespan:
        proof = prove(problem, arrangement, lowers[index], seed=seed, effort=20 * effort)
        rows, lowers[index] = _better(problem, arrangement, proof.rows), proof.lower_bound
    return _finish(problem, costs, rows, min(lowers))


def _placements(
    stages: int, ranks: int | None, placement: Sequence[int] | None
) -> list[tuple[int, ...]]:
    if placement is not None:
        used = ranks_of(placement)
        if len(placement) != stages or (ranks is not None and ranks != used):
            raise ScheduleError(
                f"a placement of {len(placement)} stages on {used} ranks for costs of {stages} "
                f"stages on {ranks or used}; give the rank of every stage"
            )
        return [tuple(placement)]
    ranks = stages if ranks is None else ranks
    if ranks < 1 or stages % ranks:
        raise ScheduleError(
            f"{stages} stages do not go evenly on {ranks} ranks; choose a number of ranks that "
            "divides them or give a placement"
        )
    if ranks == stages or ranks == 1:
        return [one_a_rank(ranks) if ranks > 1 or stages == 1 else looped(1, stages)]
    loops = [looped(ranks, stages // ranks)]
    return [vee(ranks), *loops] if stages == 2 * ranks else loops


def _best_at(
    problems: Mapping[int, Problem], lowers: Mapping[int, int], budget: int, seed: int
) -> tuple[int, Arrangement]:
    """Find the best arrangement for these caps, and the index of the problem that it solves."""
    tried = {
        place: _constructed(problem, budget // len(problems)) for place, problem in problems.items()
    }
    index = min(tried, key=lambda place: tried[place][0].makespan)
    return index, _refined(problems[index], *tried[index], lowers[index], budget, seed)


def _tighter(problems: Sequence[Problem]) -> Iterator[dict[int, Problem]]:
    """Yield the same problems in less and less memory: a tighter cap may give a better result.

    Room tempts the list scheduler to run ahead. The caps are the least that works for all ranks
    times powers of two, whatever the cap asked for, so that each larger cap tries them too.
    """
    least = [max(map(problem.least, range(problem.ranks))) for problem in problems]
    most = max(max(problem.caps) for problem in problems)
    rungs = [min(least)]
    while 0 < 2 * rungs[-1] < most:
        rungs.append(2 * rungs[-1])
    for rung in reversed(rungs):
        if rung < most:
            yield {
                place: evolve(problem, caps=[min(cap, rung) for cap in problem.caps])
                for place, problem in enumerate(problems)
                if least[place] <= rung
            }


def _constructed(problem: Problem, budget: int) -> tuple[Arrangement, Arrangement]:
    """Find the best arrangement, and the best that keeps a hand-made order, if there is any."""
    found, seeded = best(problem, budget), None
    if problem.actions <= _FEW:
        for share in (Fraction(5, 6), Fraction(1, 2)):
            caps = [
                max(problem.least(rank), int(cap * share)) for rank, cap in enumerate(problem.caps)
            ]
            tighter = best(evolve(problem, caps=caps), budget)
            found = min(found, tighter, key=lambda each: each.makespan)
    for order in _seeds(problem):
        with suppress(ScheduleError):
            kept = arrange(problem, keep_order(problem, order))
            seeded = min(seeded or kept, kept, key=lambda each: each.makespan)
    if seeded is None:
        return found, found
    return min(found, seeded, key=lambda each: each.makespan), seeded


def _refined(
    problem: Problem,
    found: Arrangement,
    seeded: Arrangement,
    lower: int,
    budget: int,
    seed: int,
) -> Arrangement:
    """Anneal the delays of blocks, then the orders of the best and of the best hand-made rows."""
    if found.makespan > lower and 3 * problem.ticks.stages * 100 < budget // 4:
        found = anneal_blocks(problem, found, budget // 4, seed)
    for start, heats in ((found, WARM), (found, COOL), (seeded, COOL)):
        if found.makespan > lower:
            walked = anneal_order(problem, start, _WALK * budget, seed, heats)
            found = min(found, walked, key=lambda each: each.makespan)
    return found


def _seeds(problem: Problem) -> list[list[list[Operation]]]:
    """List the orders of forwards and backwards of the hand-made schedules for this placement."""
    if problem.actions > _SEEDED:
        return []
    kinds = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1}
    made = (
        generator.start(problem.placement, problem.microbatches)
        for generator in GENERATORS.values()
    )
    return [
        [
            [(kinds[a.kind], a.stage, a.microbatch) for a in row if a.kind in kinds]
            for row in schedule.computations()
        ]
        for schedule in made
        if schedule is not None
    ]


def _better(problem: Problem, known: Arrangement, rows: Rows | None) -> Rows:
    """Choose the shorter of two, played with the true costs; the solver saw rounded ones."""
    if rows is None:
        return known.rows
    starts = play_rows(problem, rows)
    end = max(start + problem.lengths[kind][stage] for (kind, stage, _), start in starts.items())
    return rows if end < known.makespan else known.rows


def _finish(problem: Problem, costs: Costs, rows: Rows, lower: int) -> Found:
    schedule = tabulate(problem, rows, "search")
    line = simulate(schedule, costs)
    return Found(
        schedule=schedule,
        makespan=line.makespan,
        lower_bound=Fraction(lower, problem.ticks.per_unit),
        peak_memory=line.peak_memory,
    )
