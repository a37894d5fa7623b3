"""Every layout trains as one process does."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from processes import run_processes
from runs import FAMILIES, VARIANTS

from ms_parallel.layout import Layout

RUNS = Path(__file__).parent / "runs.py"
STEPS = 20
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

FEW = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "microbatch_size": 1},
    "recompute": {"recompute": "full"},
    "whole batch": {"microbatch_size": None},
}
"""Settings of the engine that must change nothing."""


def jobs_of(layout: str) -> dict[str, dict[str, Any]]:
    """What is trained under a layout; one process trains the same."""
    jobs: dict[str, dict[str, Any]] = {}
    for name, settings in {**VARIANTS, **FAMILIES}.items():
        steps = STEPS if name in VARIANTS else FEW
        jobs[name] = {"layout": layout, "settings": settings, "steps": steps}
    for name, options in OPTIONS.items():
        settings = VARIANTS["tied grouped"]
        jobs[name] = {"layout": layout, "settings": settings, "options": options, "steps": FEW // 2}
    return jobs


def results(layout: str) -> dict[str, dict[str, list[float]]]:
    """The curves of all jobs of a layout."""
    return results_of(Layout.parse(layout).world_size)[layout]


@cache
def results_of(count: int) -> dict[str, dict[str, dict[str, list[float]]]]:
    """The curves of all layouts of so many processes, the same from every process."""
    layouts = [text for text in ("data=1", *LAYOUTS) if Layout.parse(text).world_size == count]
    jobs = [(layout, name, job) for layout in layouts for name, job in jobs_of(layout).items()]
    of_ranks = run_processes(count, RUNS, "curves", jobs=[job for _, _, job in jobs])
    assert all(found == of_ranks[0] for found in of_ranks)
    found: dict[str, dict[str, dict[str, list[float]]]] = {layout: {} for layout in layouts}
    for (layout, name, _), curves in zip(jobs, of_ranks[0], strict=True):
        found[layout][name] = curves
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradient_norms_of_twenty_steps_equal_one_process(layout: str) -> None:
    """Tied or not, grouped queries or not."""
    for name in VARIANTS:
        one, many = results("data=1")[name], results(layout)[name]
        assert len(one["losses"]) == STEPS
        assert one["losses"][-1] < 0.8 * one["losses"][0], "the weights must really move"
        assert many["losses"] == pytest.approx(one["losses"], rel=TOLERANCE), name
        assert many["norms"] == pytest.approx(one["norms"], rel=TOLERANCE), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_and_norms_of_heads_are_split_right(layout: str) -> None:
    """Biases of split matrices, and norms that see a part of the heads, train as in one process."""
    for name in FAMILIES:
        one, many = results("data=1")[name], results(layout)[name]
        assert many["losses"] == pytest.approx(one["losses"], rel=TOLERANCE), name
        assert many["norms"] == pytest.approx(one["norms"], rel=TOLERANCE), name


@pytest.mark.parametrize("layout", ["data=1", *LAYOUTS])
def test_schedule_recomputation_and_microbatches_change_nothing(layout: str) -> None:
    """GPipe, recomputed blocks and undivided batches give the curve of 1F1B in microbatches."""
    expected = results("data=1")["tied grouped"]
    for name in OPTIONS:
        found = results(layout)[name]
        losses, norms = (expected[what][: FEW // 2] for what in ("losses", "norms"))
        assert found["losses"] == pytest.approx(losses, rel=TOLERANCE), name
        assert found["norms"] == pytest.approx(norms, rel=TOLERANCE), name
