"""Which pipeline schedule is best for my stages, and what does it look like?

    python examples/train/schedule_search.py --memory-cap 4

Four ranks, twelve microbatches, and a last stage that is slow because of the head. Known schedules
are verified, simulated and compared; then a search finds one with the same memory limit, and a
lower bound on the time of any schedule. `schedule.csv` can be used in a run file as
`schedule = "schedule.csv"`, and `timelines.html` shows all timelines. Does not need torch.
"""

import argparse
from pathlib import Path

from ms_parallel.schedules import (
    Costs,
    Timeline,
    draw_html,
    draw_text,
    named_schedule,
    one_a_rank,
    search,
    simulate,
    verify,
)

RANKS, MICROBATCHES = 4, 12


def main(arguments: list[str] | None = None) -> None:
    """Compare schedules, search for a better one, and draw the timelines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("schedule-search"))
    parser.add_argument("--memory-cap", type=int, default=4, help="microbatches in memory per rank")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    # In milliseconds; the head adds half of a stage's time to each pass.
    costs = Costs(
        forward=(10, 10, 10, 15),
        backward_input=(10, 10, 10, 15),
        backward_weight=(10, 10, 10, 15),
        latency=1,
    )
    timelines: dict[str, Timeline] = {}
    for name in ("gpipe", "1f1b", "zb-h1"):
        schedule = named_schedule(name, RANKS, MICROBATCHES)
        report = verify(schedule)
        timelines[name] = simulate(schedule, costs)
        makespan, peak = float(timelines[name].makespan), max(report.peak_activations)
        print(f"{name:>8}: {makespan:4.0f} ms, at most {peak} microbatches in memory")
    best = search(
        costs,
        memory_cap=options.memory_cap,
        microbatches=MICROBATCHES,
        placement=one_a_rank(RANKS),
        effort=0.1,
    )
    timelines["found"] = simulate(best.schedule, costs)
    makespan, lower_bound = float(best.makespan), float(best.lower_bound)
    print(f"   found: {makespan:4.0f} ms; no schedule is faster than {lower_bound:.0f} ms")
    print(draw_text(timelines["found"]))
    (options.folder / "schedule.csv").write_text(best.schedule.to_csv())
    (options.folder / "timelines.html").write_text(
        draw_html(*timelines.values(), titles=list(timelines), unit="ms")
    )
    assert best.makespan <= timelines["1f1b"].makespan


if __name__ == "__main__":
    main()
