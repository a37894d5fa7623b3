"""Optimal schedules by OR-tools CP-SAT, or a lower bound if the time limit comes first.

Microbatches are identical, so every stage may process them in order without loss: sorting the
starts of each kind of action preserves all dependencies and the memory. This removes all symmetry.
"""

from typing import Any

from attrs import evolve, frozen

from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.construction.problem import Arrangement, Operation, Problem, Rows
from ms_parallel.schedules.solver.row_simulator import simulate_rows
from ms_parallel.schedules.table.costs import Ticks

_MAX_STEPS = 100_000
"""Maximum makespan in steps of the solver, to keep its integers small."""


@frozen(kw_only=True)
class ExactResult:
    """Result of the solver."""

    rows: Rows | None
    """Operations of each rank; None if no shorter schedule was found."""
    lower_bound: int
    """Lower bound on the makespan, in ticks."""


def prove(
    problem: Problem, incumbent: Arrangement, lower_bound: int, *, seed: int, effort: float
) -> ExactResult:
    """Search all schedules that are shorter than a known one.

    Args:
        problem: scheduling problem.
        incumbent: known schedule to start from.
        lower_bound: known lower bound, in ticks.
        seed: seed of the solver.
        effort: limit in the solver's deterministic time, roughly seconds.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError(
            "an exact search needs OR-tools, which is not installed; "
            "pip install 'ms-parallel[search]', or set exact_search=False"
        ) from None
    grain = max(1, incumbent.makespan // _MAX_STEPS)
    # Costs are rounded down, so that a bound for the coarse problem holds for the true one.
    coarse = evolve(problem, ticks=_round_down(problem.ticks, grain))
    model = cp_model.CpModel()
    # The incumbent itself must fit below the horizon.
    horizon = -(-incumbent.makespan // grain)
    starts = _formulate(model, coarse, horizon, lower_bound // grain)
    _hint(model, coarse, incumbent, starts)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    # Several strategies take turns in one thread, so the result is the same on every machine.
    solver.parameters.interleave_search = True
    solver.parameters.num_workers = 8
    status = solver.solve(model)
    # Back from steps of the solver to ticks.
    bound = max(lower_bound, int(solver.best_objective_bound) * grain)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return ExactResult(rows=None, lower_bound=lower_bound)
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(problem.ranks)]
    for (phase, stage, number), variable in starts.items():
        rows[problem.placement[stage]].append((solver.value(variable), phase, stage, number))
    return ExactResult(
        rows=tuple(tuple((k, s, n) for _, k, s, n in sorted(row)) for row in rows),
        lower_bound=min(bound, incumbent.makespan),
    )


def _round_down(ticks: Ticks, grain: int) -> Ticks:
    """Round the costs down: a lower bound for these is one for the true costs."""
    shorter = ticks.changed(lambda times: tuple(t // grain for t in times), Ticks.TIMES)
    return evolve(shorter, latency=ticks.latency // grain)


def _formulate(
    model: Any, problem: Problem, horizon: int, lower_bound: int
) -> dict[Operation, Any]:
    """Add variables, constraints and objective to the model; return the starts of all actions."""
    makespan = model.new_int_var(lower_bound, horizon, "makespan")
    starts: dict[Operation, Any] = {}
    busy: list[list[Any]] = [[] for _ in range(problem.ranks)]
    for stage, rank in enumerate(problem.placement):
        for phase in range(3):
            length = problem.lengths[phase][stage]
            for number in range(problem.microbatches):
                start = model.new_int_var(0, horizon - length, "")
                starts[phase, stage, number] = start
                busy[rank].append(model.new_fixed_size_interval_var(start, length, ""))
                if number:
                    # Microbatches in order, which loses nothing and removes symmetry.
                    model.add(start >= starts[phase, stage, number - 1] + length)
            # `start` is the last microbatch's, which ends last.
            model.add(makespan >= start + length)
    for intervals in busy:
        model.add_no_overlap(intervals)
    _connect(model, problem, starts, horizon)
    _limit_memory(model, problem, starts, horizon)
    model.minimize(makespan)
    return starts


def _connect(model: Any, problem: Problem, starts: dict[Operation, Any], horizon: int) -> None:
    """Require every action to start after its inputs, including messages over links."""
    ticks, placement, last = problem.ticks, problem.placement, problem.ticks.stages - 1
    links: dict[tuple[int, int], list[Any]] = {}

    def send(source: Any, length: int, stage: int, target_stage: int, target: Any) -> None:
        end = source + length
        if placement[stage] == placement[target_stage]:
            model.add(target >= end)
            return
        transfer = ticks.transfer[min(stage, target_stage)]
        if transfer:
            transfer_start = model.new_int_var(0, horizon, "")
            # A message may wait for its link.
            model.add(transfer_start >= end)
            interval = model.new_fixed_size_interval_var(transfer_start, transfer, "")
            links.setdefault((placement[stage], placement[target_stage]), []).append(interval)
            end = transfer_start + transfer
        model.add(target >= end + ticks.latency)

    for number in range(problem.microbatches):
        for stage in range(last + 1):
            f, i, w = (starts[phase, stage, number] for phase in range(3))
            model.add(i >= f + ticks.forward[stage])
            model.add(w >= i + ticks.backward_input[stage])
            if stage < last:
                next_stage = stage + 1
                send(f, ticks.forward[stage], stage, next_stage, starts[0, next_stage, number])
                gradient = starts[1, next_stage, number]
                send(gradient, ticks.backward_input[next_stage], next_stage, stage, i)
    for intervals in links.values():
        model.add_no_overlap(intervals)


def _limit_memory(model: Any, problem: Problem, starts: dict[Operation, Any], horizon: int) -> None:
    """Limit memory: full activations from forward to end of I, retained parts to end of W."""
    ticks = problem.ticks
    for rank, cap in enumerate(problem.caps):
        stages = [stage for stage, stage_rank in enumerate(problem.placement) if stage_rank == rank]
        # The cap cannot bind.
        if cap >= sum(ticks.activation[stage] for stage in stages) * problem.microbatches:
            continue
        intervals, demands = [], []
        for stage in stages:
            for number in range(problem.microbatches):
                f, i, w = (starts[phase, stage, number] for phase in range(3))
                input_done = i + ticks.backward_input[stage]
                weight_done = w + ticks.backward_weight[stage]
                # Full activation until I ends, then the retained part until W ends.
                for begin, end, demand in (
                    (f, input_done, ticks.activation[stage]),
                    (input_done, weight_done, ticks.retained[stage]),
                ):
                    size = model.new_int_var(0, horizon, "")
                    intervals.append(model.new_interval_var(begin, size, end, ""))
                    demands.append(demand)
        model.add_cumulative(intervals, demands, cap)


def _hint(
    model: Any, problem: Problem, incumbent: Arrangement, starts: dict[Operation, Any]
) -> None:
    """Give the known schedule to the solver as a hint, timed with the solver's costs."""
    for key, start in simulate_rows(problem, incumbent.rows).items():
        model.add_hint(starts[key], start)
