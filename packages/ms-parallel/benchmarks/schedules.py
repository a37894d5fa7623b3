"""Bubbles and peak activations of every schedule and of `search`, compared with torch's schedules.

    python packages/ms-parallel/benchmarks/schedules.py              # all, ten minutes
    python packages/ms-parallel/benchmarks/schedules.py --ranks 2 4  # only these sizes
    python packages/ms-parallel/benchmarks/schedules.py --ranks      # published figures and speed

A model has 2p small stages; schedules with one stage per rank join them in pairs. Memory is in
microbatches of a full rank, so 1F1B holds p. The bubble is the makespan beyond the busiest rank's
work, relative to the makespan. A search's cell has bubble (peak), placement, the proved gap to any
schedule with the tried placements, and the best named schedule within the cap with its makespan
over ours. torch's schedules are read as CSV from torch.distributed.pipelining and simulated like
ours; no process is started. The exit code is 1 if a named schedule that fits is shorter than the
search's, or a published figure is not reached.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import SimpleNamespace

from attrs import evolve

from ms_parallel.schedules import (
    Costs,
    Found,
    Schedule,
    dualpipe_v,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    search,
    simulate,
    v_half,
    v_min,
    verify,
    zb1p,
    zb2p,
    zb_v,
)
from ms_parallel.schedules.generators.looped.breadth_first import breadth_first
from ms_parallel.schedules.table.placements import one_a_rank, vee

HALF = Fraction(1, 2)
COLUMNS = (
    "GPipe", "1F1B", "interleaved", "breadth-first", "ZB1P", "ZB2P", "torch interleaved ZB",
    "ZB-V", "V-Half", "V-Min", "DualPipeV",
)  # fmt: skip
"""Columns of the table of named schedules; torch's other schedules equal ours of the same name."""


def factors(ranks: int, equal: bool) -> list[Fraction]:
    """Sizes of the small stages; unequal ones have an embedding, a head, and uneven layers."""
    if equal:
        return [HALF] * (2 * ranks)
    sizes = [HALF * (Fraction(11, 10) if stage % 3 == 1 else 1) for stage in range(2 * ranks)]
    sizes[0] += Fraction(1, 20)
    sizes[-1] += Fraction(1, 5)
    return sizes


def costs_of(sizes: Sequence[Fraction], equal: bool, share: Fraction) -> Costs:
    """F/I/W of 1/1/1 without latency, or of 1/1.3/.7 with a latency of .1."""
    input_time, weight_time = (1, 1) if equal else (Fraction(13, 10), Fraction(7, 10))
    return Costs(
        forward=sizes,
        backward_input=[size * input_time for size in sizes],
        backward_weight=[size * weight_time for size in sizes],
        latency=0 if equal else Fraction(1, 10),
        activation=[share] * len(sizes),
    )


def join_pairs(sizes: Sequence[Fraction]) -> list[Fraction]:
    """Sizes with one stage per rank: neighboring small stages joined."""
    return [sizes[i] + sizes[i + 1] for i in range(0, len(sizes), 2)]


def bubble(makespan: Fraction, costs: Costs, ranks: int, placement: Sequence[int], m: int) -> float:
    """Makespan beyond the busiest rank's work, relative to the makespan."""
    work = [Fraction(0)] * ranks
    for stage, rank in enumerate(placement):
        work[rank] += costs.forward[stage] + costs.backward_input[stage]
        work[rank] += costs.backward_weight[stage]
    return float(1 - max(work) * m / makespan)


def torch_schedules(ranks: int, microbatches: int) -> dict[str, Schedule]:
    """Schedules of torch, from the classes that plan without processes, on stand-in stages."""
    from torch.distributed.pipelining import schedules

    def stages(count: int) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                num_stages=ranks * count, group_size=ranks, group_rank=0, group=None,
                stage_index=index, submod=None, is_last=False, is_first=False,
            )
            for index in range(count)
        ]  # fmt: skip

    by_name = {}
    for name, schedule_class, count in (
        ("interleaved 1F1B", schedules.ScheduleInterleaved1F1B, 2),
        ("looped BFS", schedules.ScheduleLoopedBFS, 2),
        ("interleaved ZB", schedules.ScheduleInterleavedZeroBubble, 2),
        ("ZBV", schedules.ScheduleZBVZeroBubble, 2),
        ("DualPipeV", schedules.ScheduleDualPipeV, 2),
    ):
        try:
            order = schedule_class(stages(count), microbatches).pipeline_order
        except ValueError as refusal:
            message = f"torch {name} refuses p={ranks} m={microbatches}: {refusal}"
            print(message, file=sys.stderr)
            continue
        text = "\n".join(
            ",".join(str(a or "") for a in order[rank]).strip(",") for rank in range(ranks)
        )
        by_name[f"torch {name}"] = Schedule.from_csv(text, name=f"torch {name}")
    return by_name


def generated_schedules(ranks: int, m: int, pair_costs: Costs) -> dict[str, Schedule]:
    """Schedules of our generators."""
    makers: dict[str, Callable[[], Schedule]] = {
        "GPipe": lambda: gpipe(ranks, m),
        "1F1B": lambda: one_f_one_b(ranks, m),
        "interleaved": lambda: interleaved_one_f_one_b(ranks, m),
        "breadth-first": lambda: breadth_first(ranks, m),
        "ZB1P": lambda: zb1p(pair_costs, m),
        "ZB2P": lambda: zb2p(pair_costs, m),
        "ZB-V": lambda: zb_v(ranks, m),
        "V-Half": lambda: v_half(ranks, m),
        "V-Min": lambda: v_min(ranks, m),
    }
    if m >= 2 * ranks:
        makers["DualPipeV"] = lambda: dualpipe_v(ranks, m)
    return {name: make() for name, make in makers.items()}


def costs_for(schedule: Schedule, ranks: int, equal: bool) -> Costs:
    """Costs for a schedule, with joined stages if it has one per rank."""
    sizes = factors(ranks, equal)
    if schedule.stages == ranks:
        return costs_of(join_pairs(sizes), equal, Fraction(1))
    return costs_of(sizes, equal, HALF)


def search_placements(
    ranks: int, m: int, cap: Fraction, equal: bool, effort: float
) -> tuple[Found, Costs]:
    """The best schedule over all placements, with the smallest bound of all."""
    sizes = factors(ranks, equal)
    small = costs_of(sizes, equal, HALF)
    joined = costs_of(join_pairs(sizes), equal, Fraction(1))
    tries = [(search(small, cap, microbatches=m, ranks=ranks, effort=effort), small)]
    if cap >= 1:
        tries.append((search(joined, cap, microbatches=m, effort=effort / 2), joined))
    best, costs = min(tries, key=lambda result: result[0].makespan)
    return evolve(best, lower_bound=min(result.lower_bound for result, _ in tries)), costs


def block(ranks: int, m: int, equal: bool, effort: float) -> tuple[str, str]:
    """A row of the search's table, and a row of the table of named schedules."""
    fastest: dict[str, tuple[Fraction, str]] = {}
    pair = costs_of(join_pairs(factors(ranks, equal)), equal, Fraction(1))
    caps = {"p/2+1": Fraction(ranks, 2) + 1, "p": Fraction(ranks), "2p": Fraction(2 * ranks)}
    figures = {}
    for name, schedule in {
        **generated_schedules(ranks, m, pair),
        **torch_schedules(ranks, m),
    }.items():
        costs = costs_for(schedule, ranks, equal)
        verify(schedule)
        line = simulate(schedule, costs)
        share = bubble(line.makespan, costs, ranks, schedule.placement, m)
        peak = max(line.peak_memory)
        figures[name] = f"{share:.4f} ({float(peak):g})"
        for cap_name, cap in caps.items():
            if peak <= cap:
                current = fastest.get(cap_name, (line.makespan, name))
                fastest[cap_name] = min(current, (line.makespan, name))
    costs_text = "equal" if equal else "unequal"
    head = f"| {ranks} | {m} | {costs_text} |"
    cells = []
    for cap_name, cap in caps.items():
        start = time.process_time()
        result, costs = search_placements(ranks, m, cap, equal, effort)
        spent = time.process_time() - start
        verify(result.schedule)
        share = bubble(result.makespan, costs, ranks, result.schedule.placement, m)
        gap = 100 * float(result.gap)
        where = {one_a_rank(ranks): "line", vee(ranks): "V"}
        other = fastest.get(cap_name)
        versus = "nothing fits"
        if other:
            versus = f"{other[1]} {float(other[0] / result.makespan):.3f}x"
            if result.makespan > other[0]:
                versus += " WORSE"
        cells.append(
            f"{share:.4f} ({float(max(result.peak_memory)):g}), "
            f"{where.get(result.schedule.placement, 'loop')}, "
            f"{'optimal' if result.proved else f'≤ {gap:.1f}% off'}; {versus}; {spent:.1f} s"
        )
    named_cells = " | ".join(figures.get(name, "—") for name in COLUMNS)
    return f"{head} {' | '.join(cells)} |", f"{head} {named_cells} |"


PUBLISHED: tuple[tuple[str, tuple[float, float, float], float, int, int, float], ...] = (
    ("1F1B", (1, 1, 1), 0, 8, 24, 0.2258),
    ("interleaved", (1, 1, 1), 0, 8, 24, 0.1273),
    ("ZB-V", (1, 1, 1), 0, 8, 24, 0.0464),
    ("ZB1P", (1, 1, 1), 0, 8, 24, 0.0886),
    ("1F1B", (1, 1.3, 0.7), 0.1, 8, 24, 0.2683),
    ("interleaved", (1, 1.3, 0.7), 0.1, 8, 24, 0.1579),
    ("ZB1P", (1, 1.3, 0.7), 0.1, 8, 24, 0.1628),
    ("search, V", (1, 1.3, 0.7), 0.1, 8, 24, 0.0989),
    ("search, V", (1, 1.3, 0.7), 0.1, 4, 8, 0.1128),
    ("search, V", (1, 1.6, 0.9), 0.1, 4, 16, 0.0564),
)
"""Schedule, F/I/W of a rank, latency, ranks, microbatches, and the published bubble: of torch's and
sail-sg's schedules; for a V with 1F1B's memory the best of sail-sg or an annealing."""


def compare_published() -> bool:
    """Print our bubbles with published ones; return whether all are reached."""
    print("\n| schedule | F/I/W/latency | p | m | published | here |\n|---|---|---|---|---|---|")
    reached = True
    for name, times, latency, ranks, m, expected in PUBLISHED:
        halves = [Fraction(str(time)) / 2 for time in times]
        small = Costs.uniform(
            2 * ranks, forward=halves[0], backward_input=halves[1], backward_weight=halves[2],
            latency=latency, activation=HALF,
        )  # fmt: skip
        pair = Costs.uniform(
            ranks, forward=times[0], backward_input=times[1], backward_weight=times[2],
            latency=latency,
        )  # fmt: skip
        if name == "search, V":
            result = search(small, ranks, microbatches=m, placement=vee(ranks))
            ours = 1 - sum(halves) * 2 * m / result.makespan
        else:
            schedule = generated_schedules(ranks, m, pair)[name]
            ours = simulate(schedule, pair if schedule.stages == ranks else small).bubble
        actual = round(float(ours), 4)
        reached &= actual <= expected if name == "search, V" else actual == expected
        text = "/".join(f"{value:g}" for value in (*times, latency))
        print(f"| {name} | {text} | {ranks} | {m} | {expected:.4f} | {actual:.4f} |", flush=True)
    return reached


def measure_search() -> None:
    """CPU seconds of the search with full effort on long pipelines."""
    print("\n| p | m | stages per rank | bubble | proved gap | CPU s |")
    print("|---|---|---|---|---|---|")
    for ranks, m, stages in ((16, 64, 1), (16, 64, 2), (64, 512, 1), (64, 512, 2)):
        costs = Costs.uniform(
            stages * ranks, backward_input=1.3, backward_weight=0.7, latency=Fraction(stages, 10)
        )
        start = time.process_time()
        result = search(costs, stages * ranks, microbatches=m, ranks=ranks)
        spent = time.process_time() - start
        share = bubble(result.makespan, costs, ranks, result.schedule.placement, m)
        print(
            f"| {ranks} | {m} | {stages} | {share:.4f} | {100 * float(result.gap):.1f}% "
            f"| {spent:.1f} |", flush=True,
        )  # fmt: skip


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--effort", type=float, default=0.5)
    options = parser.parse_args()
    print("| p | m | costs | cap p/2 + 1 | cap p | cap 2p |\n|---|---|---|---|---|---|")
    named_lines, worse = [], False
    for ranks in options.ranks:
        for m in (ranks, 2 * ranks, 4 * ranks):
            for equal in (True, False):
                search_line, named_line = block(ranks, m, equal, options.effort)
                print(search_line, flush=True)
                worse |= "WORSE" in search_line
                named_lines.append(named_line)
    print(f"\n| p | m | costs | {' | '.join(COLUMNS)} |\n|{'---|' * (3 + len(COLUMNS))}")
    print("\n".join(named_lines))
    published_reached = compare_published()
    measure_search()
    return int(worse or not published_reached)


if __name__ == "__main__":
    raise SystemExit(main())
