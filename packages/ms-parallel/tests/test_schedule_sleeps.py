"""What `simulate` says of a schedule is what the runtime takes for it."""

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
    """F, I and W of each stage; unequal ones have a slow last stage and a quick second one."""
    sizes = [1.0] * stages
    if unequal:
        sizes[1], sizes[-1] = 0.7, 1.6
    return [[size * length for length in (20.0, 26.0, 14.0)] for size in sizes]


def found(stages: int, ranks: int, microbatches: int) -> Schedule:
    """What a search makes of the unequal costs."""
    columns = list(zip(*costs_ms(stages, True), strict=True))
    costs = Costs(forward=columns[0], backward_input=columns[1], backward_weight=columns[2])
    return search(
        costs, ranks, microbatches=microbatches, placement=vee(ranks), effort=0.02
    ).schedule


def jobs_of(ranks: int, count: int) -> list[tuple[str, Schedule, bool]]:
    """Schedules of every placement, whole and split backwards, equal and unequal costs."""
    return [
        ("1F1B", one_f_one_b(ranks, count), True),
        ("GPipe", gpipe(ranks, count), False),
        ("interleaved", interleaved_one_f_one_b(ranks, count), False),
        ("ZB-H1", zb_h1(ranks, count), True),
        ("ZB-V", zb_v(ranks, count), True),
        ("search", found(2 * ranks, ranks, count), True),
        ("ZB-H1, equal", zb_h1(ranks, count), False),
    ]


@pytest.mark.parametrize(
    ("ranks", "count", "tries"), [(2, 4, 5), pytest.param(4, 6, 5, marks=pytest.mark.slow)]
)
def test_the_simulated_makespan_is_the_measured_one(ranks: int, count: int, tries: int) -> None:
    """Within 3%, with the mean costs of the recording, on processes that sleep for theirs."""
    cases = jobs_of(ranks, count)[:: 1 if ranks == 4 else 2]
    jobs: list[dict[str, Any]] = [
        {"table": schedule.to_csv(), "costs_ms": costs_ms(schedule.stages, unequal)}
        for _, schedule, unequal in cases
    ]
    names = [name for name, _, _ in cases]
    (runs, *_) = run_processes(ranks, SLEEPERS, "recorded", jobs=jobs, tries=tries)
    for (name, schedule, _), recordings in zip(cases, runs, strict=True):
        apart = []
        for times in recordings:
            line = measured(schedule, times)
            costs = measured_costs(schedule, times)
            apart.append(float(simulate(schedule, costs).makespan / line.makespan) - 1)
        assert min(map(abs, apart)) <= WITHIN, (name, apart)
        asked = sum(map(sum, jobs[names.index(name)]["costs_ms"])) * count
        busy = float(sum(measured(schedule, recordings[0]).busy)) / 1e6
        assert busy >= asked, "they really slept"
