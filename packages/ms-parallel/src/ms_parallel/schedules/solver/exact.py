"""The optimum by OR-tools CP-SAT, or its lower bound where the limit comes first.

Microbatches are alike, so each stage may take them in order without loss: sorting the starts of
every kind of action keeps all dependencies and the memory held. That removes all symmetry.
"""

from typing import Any

from attrs import evolve, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.problem import Arrangement, Operation, Problem, Rows
from ms_parallel.schedules.solver.play import play_rows
from ms_parallel.schedules.table.costs import Ticks

_FINEST = 100_000
"""Steps into which a makespan is divided at the most, so that the solver's integers stay short."""


@frozen(kw_only=True)
class ExactResult:
    """What the solver found."""

    rows: Rows | None
    """For each rank its operations; None where nothing shorter was met."""
    lower_bound: int
    """Ticks that no schedule can beat."""


def prove(
    problem: Problem, known: Arrangement, lower: int, *, seed: int, effort: float
) -> ExactResult:
    """Search all schedules shorter than a known one.

    Args:
        problem: What is to be scheduled.
        known: A schedule to begin from.
        lower: A known lower bound, in ticks.
        seed: Of the solver.
        effort: Limit in the solver's deterministic time, roughly seconds.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError(
            "an exact search needs OR-tools, which is not installed; "
            "pip install 'ms-parallel[search]', or leave exact_search out"
        ) from None
    grain = max(1, known.makespan // _FINEST)
    coarse = evolve(problem, ticks=_rounded_down(problem.ticks, grain))
    model = cp_model.CpModel()
    horizon = -(-known.makespan // grain)
    starts = _state(model, coarse, horizon, lower // grain)
    _hint(model, coarse, known, starts)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    # Several strategies taking turns in one thread: the same on every machine.
    solver.parameters.interleave_search = True
    solver.parameters.num_workers = 8
    status = solver.solve(model)
    bound = max(lower, int(solver.best_objective_bound) * grain)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactResult(rows=None, lower_bound=lower)
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(problem.ranks)]
    for (kind, stage, number), variable in starts.items():
        rows[problem.placement[stage]].append((solver.value(variable), kind, stage, number))
    return ExactResult(
        rows=tuple(tuple((k, s, n) for _, k, s, n in sorted(row)) for row in rows),
        lower_bound=min(bound, known.makespan),
    )


def _rounded_down(ticks: Ticks, grain: int) -> Ticks:
    """Shorten the costs: whatever bounds these from below bounds the true ones too."""
    shorter = ticks.changed(lambda times: tuple(t // grain for t in times), Ticks.TIMES)
    return evolve(shorter, latency=ticks.latency // grain)


def _state(model: Any, problem: Problem, horizon: int, lower: int) -> dict[Operation, Any]:
    """Add variables, constraints and objective to the model; return every action's start."""
    makespan = model.new_int_var(lower, horizon, "makespan")
    starts: dict[Operation, Any] = {}
    busy: list[list[Any]] = [[] for _ in range(problem.ranks)]
    for stage, rank in enumerate(problem.placement):
        for kind in range(3):
            length = problem.lengths[kind][stage]
            for number in range(problem.microbatches):
                start = model.new_int_var(0, horizon - length, "")
                starts[kind, stage, number] = start
                busy[rank].append(model.new_fixed_size_interval_var(start, length, ""))
                if number:
                    model.add(start >= starts[kind, stage, number - 1] + length)
            model.add(makespan >= start + length)
    for intervals in busy:
        model.add_no_overlap(intervals)
    _connect(model, problem, starts, horizon)
    _limit_memory(model, problem, starts, horizon)
    model.minimize(makespan)
    return starts


def _connect(model: Any, problem: Problem, starts: dict[Operation, Any], horizon: int) -> None:
    """Let every action start after what it needs, messages over links included."""
    ticks, home, last = problem.ticks, problem.placement, problem.ticks.stages - 1
    links: dict[tuple[int, int], list[Any]] = {}

    def send(source: Any, length: int, stage: int, to: int, target: Any) -> None:
        end = source + length
        if home[stage] == home[to]:
            model.add(target >= end)
            return
        transfer = ticks.transfer[min(stage, to)]
        if transfer:
            begin = model.new_int_var(0, horizon, "")
            model.add(begin >= end)
            interval = model.new_fixed_size_interval_var(begin, transfer, "")
            links.setdefault((home[stage], home[to]), []).append(interval)
            end = begin + transfer
        model.add(target >= end + ticks.latency)

    for number in range(problem.microbatches):
        for stage in range(last + 1):
            f, i, w = (starts[kind, stage, number] for kind in range(3))
            model.add(i >= f + ticks.forward[stage])
            model.add(w >= i + ticks.backward_input[stage])
            if stage < last:
                later = stage + 1
                send(f, ticks.forward[stage], stage, later, starts[0, later, number])
                back = starts[1, later, number]
                send(back, ticks.backward_input[later], later, stage, i)
    for intervals in links.values():
        model.add_no_overlap(intervals)


def _limit_memory(model: Any, problem: Problem, starts: dict[Operation, Any], horizon: int) -> None:
    """Cap memory: whole activations from forward to end of I, what is retained to the end of W."""
    ticks = problem.ticks
    for rank, cap in enumerate(problem.caps):
        stages = [stage for stage, home in enumerate(problem.placement) if home == rank]
        if cap >= sum(ticks.activation[stage] for stage in stages) * problem.microbatches:
            continue
        intervals, demands = [], []
        for stage in stages:
            for number in range(problem.microbatches):
                f, i, w = (starts[kind, stage, number] for kind in range(3))
                given = i + ticks.backward_input[stage]
                done = w + ticks.backward_weight[stage]
                for begin, end, demand in (
                    (f, given, ticks.activation[stage]),
                    (given, done, ticks.retained[stage]),
                ):
                    size = model.new_int_var(0, horizon, "")
                    intervals.append(model.new_interval_var(begin, size, end, ""))
                    demands.append(demand)
        model.add_cumulative(intervals, demands, cap)


def _hint(model: Any, problem: Problem, known: Arrangement, starts: dict[Operation, Any]) -> None:
    """Tell the solver about the known schedule, played with the solver's costs."""
    for key, start in play_rows(problem, known.rows).items():
        model.add_hint(starts[key], start)
