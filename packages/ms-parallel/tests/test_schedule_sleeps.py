"""Simulated times of schedules equal the runtime's."""

from pathlib import Path
from typing import Any

import pytest
from processes import run_processes

from ms_parallel.schedules import (
    Costs,
    Schedule,
    gpipe,
    interleaved_one_f_one_b,
    measured,
    measured_costs,
    one_f_one_b,
    search,
    simulate,
    vee,
    zb_h1,
    zb_v,
)

SLEEPERS = Path(__file__).parent / "sleepers.py"
WITHIN = 0.03


def costs_ms(stages: int, unequal: bool) -> list[list[float]]:
    """F, I and W of each stage; if unequal, with a slow last stage and a fast second one."""
    sizes = [1.0] * stages
    if unequal:
        sizes[1], sizes[-1] = 0.7, 1.6
    return [[size * length for length in (20.0, 26.0, 14.0)] for size in sizes]


def searched_schedule(stages: int, ranks: int, microbatches: int) -> Schedule:
    """A schedule searched for the unequal costs."""
    columns = list(zip(*costs_ms(stages, True), strict=True))
    costs = Costs(forward=columns[0], backward_input=columns[1], backward_weight=columns[2])
    return search(
        costs, ranks, microbatches=microbatches, placement=vee(ranks), effort=0.02
    ).schedule


def jobs_of(ranks: int, count: int) -> list[tuple[str, Schedule, bool]]:
    """Schedules of every placement, with full and split backward passes and both kinds of costs."""
    return [
        ("1F1B", one_f_one_b(ranks, count), True),
        ("GPipe", gpipe(ranks, count), False),
        ("interleaved", interleaved_one_f_one_b(ranks, count), False),
        ("ZB-H1", zb_h1(ranks, count), True),
        ("ZB-V", zb_v(ranks, count), True),
        ("search", searched_schedule(2 * ranks, ranks, count), True),
        ("ZB-H1, equal", zb_h1(ranks, count), False),
    ]


@pytest.mark.slow  # sleeps
@pytest.mark.parametrize(("ranks", "count", "tries"), [(2, 4, 5), (4, 6, 5)])
def test_the_simulated_makespan_equals_the_measured_one(ranks: int, count: int, tries: int) -> None:
    """Within 3%, with the recording's mean costs, on processes that sleep for their costs."""
    cases = jobs_of(ranks, count)[:: 1 if ranks == 4 else 2]
    jobs: list[dict[str, Any]] = [
        {"table": schedule.to_csv(), "costs_ms": costs_ms(schedule.stages, unequal)}
        for _, schedule, unequal in cases
    ]
    names = [name for name, _, _ in cases]
    (runs, *_) = run_processes(ranks, SLEEPERS, "record_times", jobs=jobs, tries=tries)
    for (name, schedule, _), recordings in zip(cases, runs, strict=True):
        errors = []
        for times in recordings:
            line = measured(schedule, times)
            costs = measured_costs(schedule, times)
            errors.append(float(simulate(schedule, costs).makespan / line.makespan) - 1)
        assert min(map(abs, errors)) <= WITHIN, (name, errors)
        expected_busy = sum(map(sum, jobs[names.index(name)]["costs_ms"])) * count
        busy = float(sum(measured(schedule, recordings[0]).busy)) / 1e6
        assert busy >= expected_busy, "stages did not sleep"
