"""Every layout trains like one process."""

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
# Sums of up to 1,000 float32 terms in a different order differ by about 1e-7, and 20 steps of Adam
# amplify the difference: measured at most 3e-6.
TOLERANCE = 1e-5

MANY, ENOUGH, SOME, FEW = 20, 12, 4, 2
"""Steps: of every variant in slow tests; of one process, whose loss must fall; of the variant with
all features, under each layout; of the others, whose second loss shows the first update."""
PLAIN, ALL_FEATURES = "plain", "tied grouped"
"""Variants trained by default."""
OPTIONS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "microbatch_size": 1},
    "recompute": {"recompute": "full"},
    "whole batch": {"microbatch_size": None},
}
"""Engine settings that must not change results."""
SAMPLE = {
    "data=2": (PLAIN, "transformer-xl", "qwen3_moe", "deepseek_v3", "gpt_oss", *OPTIONS),
    "pipeline=2": (PLAIN, "transformer-xl", "qwen3_moe", "deepseek_v3", "olmoe", *OPTIONS),
    "data=2,tensor=2": ("transformer-xl", "mixtral", "glm4_moe", "recompute"),
    "data=2,pipeline=2": ("qwen3", "olmoe", "whole batch"),
    "tensor=2,pipeline=2": ("biases", "qwen3_moe", "gpt_oss", "deepseek_v3", "gpipe"),
    "data=2,tensor=2,pipeline=2": (),
}
"""Default cases of layouts that run only a sample, in addition to the variant with all
features. Each family and setting occurs once in a layout of several axes."""


def jobs_of(layout: str) -> dict[str, dict[str, Any]]:
    """Default jobs of a layout; one process trains the same ones."""
    names = {ALL_FEATURES, *SAMPLE.get(layout, (PLAIN, *FAMILIES, *OPTIONS))}
    return {name: job for name, job in every_job_of(layout).items() if name in names}


def every_job_of(layout: str) -> dict[str, dict[str, Any]]:
    """All families and settings under a layout."""
    jobs: dict[str, dict[str, Any]] = {
        ALL_FEATURES: {
            "layout": layout,
            "settings": VARIANTS[ALL_FEATURES],
            "steps": ENOUGH if layout == "data=1" else SOME,
        },
        PLAIN: {"layout": layout, "settings": VARIANTS[PLAIN], "steps": FEW},
    }
    for name, settings in FAMILIES.items():
        jobs[name] = {"layout": layout, "settings": settings, "steps": FEW}
    for name, options in OPTIONS.items():
        settings = VARIANTS[ALL_FEATURES]
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
    """Curves of all jobs of a layout."""
    return results_of(Layout.parse(layout).world_size, jobs)[layout]


@cache
def results_of(
    count: int, jobs_of: Callable[[str], dict[str, dict[str, Any]]]
) -> dict[str, Curves]:
    """Curves of all layouts of `count` processes, checked to be equal on all processes."""
    layouts = [text for text in ("data=1", *LAYOUTS) if Layout.parse(text).world_size == count]
    jobs = [(layout, name, job) for layout in layouts for name, job in jobs_of(layout).items()]
    ranks = run_processes(count, RUNS, "curves", jobs=[job for _, _, job in jobs])
    assert all(rank == ranks[0] for rank in ranks)
    by_layout: dict[str, Curves] = {layout: {} for layout in layouts}
    for (layout, name, _), curves in zip(jobs, ranks[0], strict=True):
        by_layout[layout][name] = curves
    return by_layout


def check(actual: dict[str, list[float]], expected: dict[str, list[float]], name: str) -> None:
    """Compare losses and gradient norms with the start of one process's curve."""
    for key in ("losses", "norms"):
        assert actual[key] == pytest.approx(expected[key][: len(actual[key])], rel=TOLERANCE), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_equal_one_process(layout: str) -> None:
    """Tied weights with grouped queries, and neither."""
    curves = results(layout)
    assert ALL_FEATURES in curves
    for name in {ALL_FEATURES, PLAIN} & curves.keys():
        check(curves[name], results("data=1")[name], name)
    losses = results("data=1")[ALL_FEATURES]["losses"]
    assert losses[-1] < 0.8 * losses[0], "the weights must really change"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_of_twenty_steps_equal_one_process(layout: str) -> None:
    """Tied or not, grouped queries or not, with enough steps for differences to grow."""
    for name in VARIANTS:
        expected = results("data=1", long_jobs_of)[name]
        assert len(expected["losses"]) == MANY
        check(results(layout, long_jobs_of)[name], expected, name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_families_equal_one_process(layout: str) -> None:
    """Biases of split matrices, and norms on part of the heads."""
    curves = results(layout)
    for name in FAMILIES.keys() & curves.keys():
        check(curves[name], results("data=1")[name], name)


@pytest.mark.parametrize("layout", ["data=1", *LAYOUTS])
def test_schedule_recomputation_and_microbatches_change_nothing(layout: str) -> None:
    """GPipe, recomputed blocks and full batches give the curve of 1F1B with microbatches."""
    curves = results(layout)
    for name in OPTIONS.keys() & curves.keys():
        check(curves[name], results("data=1")[ALL_FEATURES], name)


def test_the_sample_covers_all_families_and_settings() -> None:
    """Each family and setting occurs with a tensor axis, and in a layout of several axes."""
    all_names = {*FAMILIES, *OPTIONS}
    assert {
        name for layout, names in SAMPLE.items() if "," in layout for name in names
    } == all_names
    for layout in ("data=1", "tensor=2"):
        assert jobs_of(layout) == every_job_of(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(SAMPLE))
def test_every_family_and_setting_trains_under_every_layout(layout: str) -> None:
    """Including cases that the default sample leaves out."""
    curves = results(layout, every_job_of)
    for name in (PLAIN, *FAMILIES):
        check(curves[name], results("data=1")[name], name)
    for name in OPTIONS:
        check(curves[name], results("data=1")[ALL_FEATURES], name)
