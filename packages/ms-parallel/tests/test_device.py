"""Engines, trainers and checkpoints on an emulated accelerator keep all tensors on the device.

The device computes like the CPU. A tensor on the wrong device or a collective on the wrong group
raises an error (see `tests/rig/` of the repository).
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from launching import IMPORTS, environment, words, write_run
from ms_rig import run_command_on_rig, run_on_rig
from processes import run_processes
from runs import FAMILIES, VARIANTS

from ms_parallel.cluster.layout import Layout

HERE = Path(__file__).parent
RUNS, DEVICE_RUNS = HERE / "runs.py", HERE / "device_runs.py"
LAYOUTS = {1: ["data=1"], 2: ["data=2", "tensor=2", "pipeline=2"]}
# Operators are the CPU's, except for attention, which is the plain formula: float32 roundings.
TOLERANCE = 1e-5
OPTIONS = {"recompute": "full", "schedule": "gpipe"}


SAMPLE = {
    "data=1": FAMILIES,
    "data=2": ("transformer-xl", "olmoe", "deepseek_v3"),
    "tensor=2": ("biases", "mixtral", "glm4_moe"),
    "pipeline=2": ("qwen3", "qwen3_moe", "gpt_oss"),
}
"""Families trained under each layout by default: all on one device and all on two."""


def jobs_of(layout: str, families: Iterable[str]) -> list[dict[str, Any]]:
    """Jobs of the families, and one with other engine settings."""
    common = {"layout": layout, "steps": 2}
    jobs = [{**common, "settings": FAMILIES[name]} for name in families]
    return [*jobs, {**common, "settings": VARIANTS["tied grouped"], "options": OPTIONS}]


@cache
def truth() -> list[dict[str, Any]]:
    """Results of one process on the CPU, for each family and for the other settings."""
    (results,) = run_processes(1, RUNS, "curves", jobs=jobs_of("data=1", FAMILIES))
    return results  # type: ignore[no-any-return]


def check_training(layouts: dict[str, Iterable[str]]) -> None:
    """Compare losses and gradient norms of two steps with the CPU's, for families by layout."""
    expected = dict(zip([*FAMILIES, "settings"], truth(), strict=True))
    names = [name for families in layouts.values() for name in (*families, "settings")]
    jobs = [job for layout, families in layouts.items() for job in jobs_of(layout, families)]
    count = Layout.parse(next(iter(layouts))).world_size
    for results in run_on_rig(count, RUNS, "curves", jobs=jobs, device=None):
        for name, curves in zip(names, results, strict=True):
            for key in ("losses", "norms"):
                assert curves[key] == pytest.approx(expected[name][key], rel=TOLERANCE), name


@pytest.mark.parametrize("count", [1, 2])
def test_engines_train_as_on_the_cpu(count: int) -> None:
    """All families on one device and on two, and each layout."""
    check_training({layout: SAMPLE[layout] for layout in LAYOUTS[count]})


@pytest.mark.slow
def test_engines_train_every_family_under_every_layout_as_on_the_cpu() -> None:
    """Including cases that the default sample leaves out."""
    check_training(dict.fromkeys(LAYOUTS[2], FAMILIES))


def test_checkpoints_load_under_other_layouts(tmp_path: Path) -> None:
    """Checkpoints, model folders, evaluation and generation, for pairs of layouts."""
    settings, folder = VARIANTS["tied grouped"], str(tmp_path)
    for count, layouts in LAYOUTS.items():
        run_on_rig(
            count,
            RUNS,
            "save_and_evaluate",
            layouts=layouts,
            settings=settings,
            folder=folder,
            device=None,
        )
    all_layouts = [layout for layouts in LAYOUTS.values() for layout in layouts]
    before = dict(zip(all_layouts, [all_layouts[-1], *all_layouts], strict=False))
    results = []
    for count, layouts in LAYOUTS.items():
        jobs = [(before[layout], layout) for layout in layouts]
        ranks = run_on_rig(
            count,
            RUNS,
            "load_and_evaluate",
            jobs=jobs,
            settings=settings,
            folder=folder,
            device=None,
        )
        results += ranks[0]
    for result in results[1:]:
        assert result["next"][0] == pytest.approx(results[0]["next"][0], rel=TOLERANCE)
        assert result["greedy"][0] == results[0]["greedy"][0]


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline=2",
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("data=2", "tensor=2")),
    ],
)
def test_schedules_are_measured_and_steps_recorded(layout: str) -> None:
    """Times come from the device's events and are gathered over its groups."""
    first, second = run_on_rig(2, DEVICE_RUNS, "search_and_record", layout=layout)
    assert first == second
    assert all(first["times"])


def test_a_custom_module_trains() -> None:
    """Its weights and buffers move to the device and are split there."""
    for layout in ("data=2", "tensor=2"):
        first, second = run_on_rig(2, DEVICE_RUNS, "custom_model", layout=layout)
        assert first == second


@pytest.mark.parametrize(
    "layout",
    [
        *("data=1", "tensor=2"),
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("data=2", "pipeline=2")),
    ],
)
def test_trainers_stop_and_resume(layout: str, corpus: Path, tmp_path: Path) -> None:
    """A resumed run has three steps, and the last loss is below the first."""
    count = 1 if layout == "data=1" else 2
    results = run_on_rig(
        count,
        DEVICE_RUNS,
        "train_and_resume",
        corpus=str(corpus),
        output=str(tmp_path),
        layout=layout,
    )
    assert [result["step"] for result in results] == [3] * count
    losses = results[0]["losses"]  # only the first process emits events
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert results[0]["held out"] is not None


def test_the_command_trains_on_the_best_device(corpus: Path, tmp_path: Path) -> None:
    """Under torchrun, with one device per process."""
    run = write_run(tmp_path / "run.toml", corpus, steps=2, device=None)
    command_words = words(run, 2, "--set", "parallel_config.data=2")
    result = run_command_on_rig(command_words, variables=environment(), imports=IMPORTS)
    assert result.returncode == 0, result.stderr
