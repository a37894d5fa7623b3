"""Evaluation, generation and saved state of an engine do not depend on its layout."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from processes import run_processes
from runs import VARIANTS

from ms_parallel.cluster.layout import Layout

RUNS = Path(__file__).parent / "runs.py"
SETTINGS = VARIANTS["tied grouped"]
SAVED = {
    1: ["data=1"],
    2: ["data=2", "tensor=2", "pipeline=2"],
    4: ["data=2,tensor=2", "tensor=2,pipeline=2"],
    8: ["data=2,tensor=2,pipeline=2"],
}
LOADED = {
    1: [("tensor=2,pipeline=2", "data=1")],
    2: [("data=1", "tensor=2"), ("tensor=2", "data=2"), ("data=2,tensor=2", "pipeline=2")],
}
LATE = {
    1: [("data=2,tensor=2,pipeline=2", "data=1")],
    4: [("pipeline=2", "data=2,tensor=2"), ("data=2", "tensor=2,pipeline=2")],
}
"""Pairs of slow tests."""
# As in test_layouts: float32 sums in a different order, amplified over four steps.
TOLERANCE = 1e-5

Results = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the checkpoints of all layouts."""
    return tmp_path_factory.mktemp("saved")


@cache
def saved_results(folder: Path, count: int) -> Results:
    """Results of each of `count` processes, which also save checkpoints of their layouts."""
    layouts = SAVED[count]
    return run_processes(
        count, RUNS, "save_and_evaluate", layouts=layouts, settings=SETTINGS, folder=str(folder)
    )


def check(name: str, result: dict[str, Any], reference: dict[str, Any]) -> None:
    """Compare the results of a rank with its rows of the single process's."""
    for key in ("losses", "from logits", "greedy", "sampled"):
        rows = len(result[key])
        local = reference[key][result["data"] * rows :][:rows]
        if key in ("greedy", "sampled"):
            assert result[key] == local, (name, key)
            continue
        flat, expected = (_flat(values) for values in (result[key], local))
        assert flat == pytest.approx(expected, rel=TOLERANCE, abs=1e-5), (name, key)
    for curve, expected in zip(result["next"], reference["next"], strict=True):
        assert curve == pytest.approx(expected, rel=TOLERANCE), name


def _flat(values: Any) -> list[float]:
    return [x for v in values for x in _flat(v)] if isinstance(values, list) else [values]


@pytest.mark.parametrize(
    "count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (4, 8))]
)
def test_evaluation_and_generation_equal_one_process(folder: Path, count: int) -> None:
    """Losses, logits, greedy and sampled tokens, with prompts of different lengths."""
    expected = saved_results(folder, 1)[0][0]
    assert len({tuple(row) for row in expected["sampled"]}) > 1
    for results in saved_results(folder, count):
        for layout, result in zip(SAVED[count], results, strict=True):
            check(layout, result, expected)


@pytest.mark.parametrize(
    ("count", "jobs"),
    [*LOADED.items(), *(pytest.param(*late, marks=pytest.mark.slow) for late in LATE.items())],
)
def test_a_checkpoint_loads_under_another_layout(
    folder: Path, count: int, jobs: list[tuple[str, str]]
) -> None:
    """Weights, moments and counters: results and the next two updates are as if uninterrupted.

    The model folder saved with it contains the same model.
    """
    for layout, _ in jobs:
        saved_results(folder, Layout.parse(layout).world_size)
    ranks = run_processes(
        count, RUNS, "load_and_evaluate", jobs=jobs, settings=SETTINGS, folder=str(folder)
    )
    for results in ranks:
        for job, result in zip(jobs, results, strict=True):
            assert result["step"] == 2
            assert result["losses of the folder"] == result["losses"], job
            check(str(job), result, saved_results(folder, 1)[0][0])
