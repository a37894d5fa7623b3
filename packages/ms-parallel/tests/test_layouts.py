"""Every layout trains as one process does."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from processes import run_processes
from runs import FAMILIES, VARIANTS

from ms_parallel.cluster.layout import Layout

RUNS = Path(__file__).parent / "runs.py"
LAYOUTS = (
    "data=2",
    "tensor=2",
    "pipeline=2",
    "data=2,tensor=2",
    "data=2,pipeline=2",
    "tensor=2,pipeline=2",
    "data=2,tensor=2,pipeline=2",
)
# Sums of up to 1,000 float32 terms taken in another order differ by about 1e-7 relative, and each
# of 20 steps of Adam feeds the difference into the next: measured at most 3e-6.
TOLERANCE = 1e-5

MANY, ENOUGH, SOME, FEW = 20, 12, 4, 2
"""Steps: of every variant in the soak; of one process, whose loss is to fall; of the variant that
has all, under each layout; of the others, whose second loss shows the first update."""
NOTHING, ALL = "plain", "tied grouped"
"""The variants that are trained by default."""
OPTIONS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "microbatch_size": 1},
    "recompute": {"recompute": "full"},
    "whole batch": {"microbatch_size": None},
}
"""Settings of the engine that must change nothing."""
SAMPLE = {
    "data=2": (NOTHING, "transformer-xl", "qwen3_moe", "deepseek_v3", "gpt_oss", *OPTIONS),
    "data=2,tensor=2": ("transformer-xl", "mixtral", "glm4_moe", "recompute"),
    "data=2,pipeline=2": ("qwen3", "olmoe", "whole batch"),
    "tensor=2,pipeline=2": ("biases", "qwen3_moe", "gpt_oss", "deepseek_v3", "gpipe"),
    "data=2,tensor=2,pipeline=2": (),
}
"""What is trained by default beside the variant that has all, where that is not everything: rows
are cut alike for all families, and each family and setting is there once where axes meet."""


def jobs_of(layout: str) -> dict[str, dict[str, Any]]:
    """What is trained under a layout by default; one process trains the same."""
    kept = {ALL, *SAMPLE.get(layout, (NOTHING, *FAMILIES, *OPTIONS))}
    return {name: job for name, job in every_job_of(layout).items() if name in kept}


def every_job_of(layout: str) -> dict[str, dict[str, Any]]:
    """Every family and setting under a layout."""
    jobs: dict[str, dict[str, Any]] = {
        ALL: {
            "layout": layout,
            "settings": VARIANTS[ALL],
            "steps": ENOUGH if layout == "data=1" else SOME,
        },
        NOTHING: {"layout": layout, "settings": VARIANTS[NOTHING], "steps": FEW},
    }
    for name, settings in FAMILIES.items():
        jobs[name] = {"layout": layout, "settings": settings, "steps": FEW}
    for name, options in OPTIONS.items():
        settings = VARIANTS[ALL]
        jobs[name] = {"layout": layout, "settings": settings, "options": options, "steps": FEW}
    return jobs


def long_jobs_of(layout: str) -> dict[str, dict[str, Any]]:
    """The variants for many steps."""
    return {
        name: {"layout": layout, "settings": settings, "steps": MANY}
        for name, settings in VARIANTS.items()
    }


Curves = dict[str, dict[str, list[float]]]


def results(layout: str, jobs: Callable[[str], dict[str, dict[str, Any]]] = jobs_of) -> Curves:
    """The curves of all jobs of a layout."""
    return results_of(Layout.parse(layout).world_size, jobs)[layout]


@cache
def results_of(
    count: int, jobs_of: Callable[[str], dict[str, dict[str, Any]]]
) -> dict[str, Curves]:
    """The curves of all layouts of so many processes, the same from every process."""
    layouts = [text for text in ("data=1", *LAYOUTS) if Layout.parse(text).world_size == count]
    jobs = [(layout, name, job) for layout in layouts for name, job in jobs_of(layout).items()]
    of_ranks = run_processes(count, RUNS, "curves", jobs=[job for _, _, job in jobs])
    assert all(found == of_ranks[0] for found in of_ranks)
    found: dict[str, Curves] = {layout: {} for layout in layouts}
    for (layout, name, _), curves in zip(jobs, of_ranks[0], strict=True):
        found[layout][name] = curves
    return found


def check(many: dict[str, list[float]], one: dict[str, list[float]], name: str) -> None:
    """Losses and gradient norms are one process's, as far as the curve goes."""
    for what in ("losses", "norms"):
        assert many[what] == pytest.approx(one[what][: len(many[what])], rel=TOLERANCE), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_equal_one_process(layout: str) -> None:
    """Tied with grouped queries, and neither."""
    found = results(layout)
    assert ALL in found
    for name in {ALL, NOTHING} & found.keys():
        check(found[name], results("data=1")[name], name)
    losses = results("data=1")[ALL]["losses"]
    assert losses[-1] < 0.8 * losses[0], "the weights must really move"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_of_twenty_steps_equal_one_process(layout: str) -> None:
    """Tied or not, grouped queries or not, over as many steps as a difference needs to grow."""
    for name in VARIANTS:
        one = results("data=1", long_jobs_of)[name]
        assert len(one["losses"]) == MANY
        check(results(layout, long_jobs_of)[name], one, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_and_norms_of_heads_are_split_right(layout: str) -> None:
    """Biases of split matrices, and norms that see a part of the heads, train as in one process."""
    found = results(layout)
    for name in FAMILIES.keys() & found.keys():
        check(found[name], results("data=1")[name], name)


@pytest.mark.parametrize("layout", ["data=1", *LAYOUTS])
def test_schedule_recomputation_and_microbatches_change_nothing(layout: str) -> None:
    """GPipe, recomputed blocks and undivided batches give the curve of 1F1B in microbatches."""
    found = results(layout)
    for name in OPTIONS.keys() & found.keys():
        check(found[name], results("data=1")[ALL], name)


def test_the_sample_leaves_nothing_out() -> None:
    """Each family and setting under a tensor axis, a pipeline, and where axes meet."""
    every = {*FAMILIES, *OPTIONS}
    assert {name for layout, names in SAMPLE.items() if "," in layout for name in names} == every
    for layout in ("data=1", "tensor=2", "pipeline=2"):
        assert jobs_of(layout) == every_job_of(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(SAMPLE))
def test_every_family_and_setting_trains_under_every_layout(layout: str) -> None:
    """What the sample leaves to others, too."""
    found = results(layout, every_job_of)
    for name in (NOTHING, *FAMILIES):
        check(found[name], results("data=1")[name], name)
    for name in OPTIONS:
        check(found[name], results("data=1")[ALL], name)
