"""What an engine answers and saves does not depend on its layout."""

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
    4: [("pipeline=2", "data=2,tensor=2")],
}
LATE = {
    1: [("data=2,tensor=2,pipeline=2", "data=1")],
    4: [("data=2", "tensor=2,pipeline=2")],
}
"""What the soak loads, too."""
# As in test_layouts: float32 sums in another order, fed back through four steps.
TOLERANCE = 1e-5

Answers = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoint of each layout is saved."""
    return tmp_path_factory.mktemp("saved")


@cache
def saved(folder: Path, count: int) -> Answers:
    """What each of so many processes answered where they saved the checkpoints of their layouts."""
    layouts = SAVED[count]
    return run_processes(
        count, RUNS, "save_and_answer", layouts=layouts, settings=SETTINGS, folder=str(folder)
    )


def check(name: str, answer: dict[str, Any], one: dict[str, Any]) -> None:
    """An answer of one process of a layout is its rows of the single process's."""
    for what in ("losses", "from logits", "greedy", "sampled"):
        share = len(answer[what])
        mine = one[what][answer["data"] * share :][:share]
        if what in ("greedy", "sampled"):
            assert answer[what] == mine, (name, what)
            continue
        flat, expected = (_flat(values) for values in (answer[what], mine))
        assert flat == pytest.approx(expected, rel=TOLERANCE, abs=1e-5), (name, what)
    for curve, expected in zip(answer["next"], one["next"], strict=True):
        assert curve == pytest.approx(expected, rel=TOLERANCE), name


def _flat(values: Any) -> list[float]:
    return [x for v in values for x in _flat(v)] if isinstance(values, list) else [values]


@pytest.mark.parametrize("count", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_evaluation_and_generation_equal_one_process(folder: Path, count: int) -> None:
    """Losses, logits, greedy and sampled tokens, with prompts of unlike lengths."""
    one = saved(folder, 1)[0][0]
    assert len({tuple(row) for row in one["sampled"]}) > 1
    for of_rank in saved(folder, count):
        for layout, answer in zip(SAVED[count], of_rank, strict=True):
            check(layout, answer, one)


@pytest.mark.parametrize(
    ("count", "jobs"),
    [*LOADED.items(), *(pytest.param(*late, marks=pytest.mark.slow) for late in LATE.items())],
)
def test_a_checkpoint_loads_under_another_layout(
    folder: Path, count: int, jobs: list[tuple[str, str]]
) -> None:
    """Weights, moments and counters: the answers and the next two updates are as if undisturbed.

    The Hugging Face folder that was saved beside it is the same model.
    """
    for layout, _ in jobs:
        saved(folder, Layout.parse(layout).world_size)
    of_ranks = run_processes(
        count, RUNS, "load_and_answer", jobs=jobs, settings=SETTINGS, folder=str(folder)
    )
    for of_rank in of_ranks:
        for job, answer in zip(jobs, of_rank, strict=True):
            assert answer["step"] == 2
            assert answer["losses of the folder"] == answer["losses"], job
            check(str(job), answer, saved(folder, 1)[0][0])
