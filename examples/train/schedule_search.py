"""Which pipeline schedule is best for my stages, and what does it look like?

    python examples/train/schedule_search.py --memory-cap 4

Four ranks, twelve microbatches, a head that makes the last stage slow. Known schedules are proved,
simulated and compared; then one is searched for under the same memory, with a bound on how much
shorter any could be. `schedule.csv` goes into a run file as `schedule = "schedule.csv"`, and
`timelines.html` draws all of them. No torch is needed.
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
    """Compare, search, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("schedule-search"))
    parser.add_argument("--memory-cap", type=int, default=4, help="microbatches a rank may hold")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    # Milliseconds, say: a head takes half of a stage again, forwards and backwards.
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
        whole, held = float(timelines[name].makespan), max(report.peak_activations)
        print(f"{name:>8}: {whole:4.0f} ms, holds {held} microbatches at most")
    found = search(
        costs,
        memory_cap=options.memory_cap,
        microbatches=MICROBATCHES,
        placement=one_a_rank(RANKS),
        effort=0.1,
    )
    timelines["found"] = simulate(found.schedule, costs)
    whole, bound = float(found.makespan), float(found.lower_bound)
    print(f"   found: {whole:4.0f} ms, and none is below {bound:.0f} ms")
    print(draw_text(timelines["found"]))
    (options.folder / "schedule.csv").write_text(found.schedule.to_csv())
    (options.folder / "timelines.html").write_text(
        draw_html(*timelines.values(), titles=list(timelines), unit="ms")
    )
    assert found.makespan <= timelines["1f1b"].makespan


if __name__ == "__main__":
    main()
