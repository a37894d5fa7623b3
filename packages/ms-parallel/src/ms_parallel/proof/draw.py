"""Generates the cases of a proof: the simplest of each kind, then random combinations."""

import random
from collections.abc import Iterator
from itertools import combinations, product
from math import prod

from attrs import evolve

from ms_parallel.cluster.layout import Layout
from ms_parallel.memory.modes import RECOMPUTE_MODES
from ms_parallel.proof.batches import LENGTH, ROWS
from ms_parallel.proof.records import Case
from ms_parallel.split.context.kinds import ContextKind

SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")
CONTEXT_KINDS: tuple[ContextKind, ...] = ("all_gather", "ulysses", "ring")
_SPLIT = ("data", "tensor", "pipeline", "context")


_EXPERTS = (
    "data=2,expert=2",
    "data=4,expert=2",
    "data=2,tensor=2,expert=2",
    "data=2,pipeline=2,expert=2",
    "data=2,context=2,expert=4",
)
"""Simplest layouts with expert parallelism: alone, and with every other axis."""


def draw_cases(processes: int, count: int, seed: int, experts: int = 1) -> list[Case]:
    """Generate cases of up to `processes` processes, the simplest first.

    Args:
        processes: maximum processes of a layout.
        count: number of cases; those after the simplest of each kind are random.
        seed: random seed.
        experts: experts per layer; with more than one, expert parallelism is included.
    """
    cases = list(_simplest(processes, experts))
    rng = random.Random(seed)
    layouts = [layout for layout in _layouts(processes, experts) if layout.world_size > 1]
    # A bound, because there may be fewer distinct cases than requested.
    for _ in range(50 * count):
        if len(cases) >= count or not layouts:
            break
        case = _random_case(rng.choice(layouts), rng)
        if case not in cases:
            cases.append(case)
    return cases[: max(count, 1)]


def _simplest(processes: int, experts: int) -> Iterator[Case]:
    yield Case(layout="data=1", processes=1, microbatch_size=3)
    yield Case(layout="data=1", processes=1, recompute="full")
    if processes >= 2:
        for axis in _SPLIT:
            yield Case(layout=f"{axis}=2", processes=2, microbatch_size=1)
        yield Case(layout="pipeline=2", processes=2, microbatch_size=1, schedule="zb-h1")
        yield Case(layout="tensor=2", processes=2, recompute="full")
    for expert_layout in map(Layout.parse, _EXPERTS):
        size = expert_layout.world_size
        if size <= processes and experts % expert_layout.expert == 0:
            yield Case(layout=str(expert_layout), processes=size, microbatch_size=1)
    if processes >= 4:
        for pair in combinations(_SPLIT, 2):
            layout = ",".join(f"{axis}=2" for axis in pair)
            yield Case(layout=layout, processes=4, microbatch_size=1)


def _layouts(processes: int, experts: int) -> list[Layout]:
    sizes = [size for size in (1, 2, 4, 8) if size <= processes]
    plain = (
        Layout(**dict(zip(_SPLIT, axis_sizes, strict=True)))
        for axis_sizes in product(sizes, repeat=len(_SPLIT))
        if prod(axis_sizes) <= processes
    )
    with_experts = (
        evolve(layout, expert=size)
        for layout in plain
        for size in sizes
        if layout.token_ranks % size == 0 and experts % size == 0
    )
    fits = (layout for layout in with_experts if ROWS % layout.data_ranks == 0)
    return [layout for layout in fits if LENGTH % layout.row_parts == 0]


def _random_case(layout: Layout, rng: random.Random) -> Case:
    schedule = rng.choice(SCHEDULES) if layout.pipeline > 1 else "1f1b"
    rows = ROWS // layout.data_ranks
    sizes: list[int | None] = [1] if layout.pipeline > 1 else [None, *range(1, rows)]
    return Case(
        layout=str(layout),
        processes=layout.world_size,
        schedule=schedule,
        microbatch_size=rng.choice(sizes),
        recompute=rng.choice(RECOMPUTE_MODES),
        context_attention=rng.choice(CONTEXT_KINDS) if layout.context > 1 else "auto",
    )
