"""Draws the cases: first the simplest of each kind, then combinations by seed."""

import random
from collections.abc import Iterator
from itertools import combinations, product
from math import prod

from ms_parallel.cluster.layout import Layout
from ms_parallel.proof.batches import LENGTH, ROWS
from ms_parallel.proof.records import Case
from ms_parallel.split.context.kinds import Kind

SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")
CONTEXT_KINDS: tuple[Kind, ...] = ("all_gather", "ulysses", "ring")
_SPLIT = ("data", "tensor", "pipeline", "context")


def draw_cases(processes: int, count: int, seed: int) -> list[Case]:
    """Cases of up to so many processes, the simplest first.

    Args:
        processes: most of a layout.
        count: cases in all; the simplest of each kind come first, and the rest is drawn.
        seed: of the draw.
    """
    cases = list(_simplest(processes))
    chance = random.Random(seed)
    layouts = [layout for layout in _layouts(processes) if layout.world_size > 1]
    for _ in range(50 * count):
        if len(cases) >= count or not layouts:
            break
        drawn = _drawn(chance.choice(layouts), chance)
        if drawn not in cases:
            cases.append(drawn)
    return cases[: max(count, 1)]


def _simplest(processes: int) -> Iterator[Case]:
    yield Case(layout="data=1", processes=1, microbatch_size=3)
    yield Case(layout="data=1", processes=1, recompute="full")
    if processes >= 2:
        for axis in _SPLIT:
            yield Case(layout=f"{axis}=2", processes=2, microbatch_size=1)
        yield Case(layout="pipeline=2", processes=2, microbatch_size=1, schedule="zb-h1")
        yield Case(layout="tensor=2", processes=2, recompute="full")
    if processes >= 4:
        for pair in combinations(_SPLIT, 2):
            layout = ",".join(f"{axis}=2" for axis in pair)
            yield Case(layout=layout, processes=4, microbatch_size=1)


def _layouts(processes: int) -> list[Layout]:
    sizes = [size for size in (1, 2, 4, 8) if size <= processes]
    made = (
        Layout(**dict(zip(_SPLIT, drawn, strict=True)))
        for drawn in product(sizes, repeat=len(_SPLIT))
        if prod(drawn) <= processes
    )
    fits = (layout for layout in made if ROWS % layout.readers == 0)
    return [layout for layout in fits if LENGTH % layout.row_parts == 0]


def _drawn(layout: Layout, chance: random.Random) -> Case:
    schedule = chance.choice(SCHEDULES) if layout.pipeline > 1 else "1f1b"
    rows = ROWS // layout.readers
    sizes: list[int | None] = [1] if layout.pipeline > 1 else [None, *range(1, rows)]
    return Case(
        layout=str(layout),
        processes=layout.world_size,
        schedule=schedule,
        microbatch_size=chance.choice(sizes),
        recompute=chance.choice(("none", "full")),
        context_attention=chance.choice(CONTEXT_KINDS) if layout.context > 1 else "auto",
    )
