"""Engines, trainers and checkpoints on a device that is not the CPU: no tensor of theirs is lost.

The device computes as the CPU does; a tensor on the wrong one, or a collective on the wrong group,
raises (see `tests/rig/` at the repository's top).
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
# The operators are the CPU's but for attention, which is the plain formula: float32's rounding.
TOLERANCE = 1e-5
OPTIONS = {"recompute": "full", "schedule": "gpipe"}


SAMPLE = {
    "data=1": FAMILIES,
    "data=2": ("transformer-xl", "olmoe", "deepseek_v3"),
    "tensor=2": ("biases", "mixtral", "glm4_moe"),
    "pipeline=2": ("qwen3", "qwen3_moe", "gpt_oss"),
}
"""The families that are trained under each layout by default: all on one device and on two."""


def jobs_of(layout: str, families: Iterable[str]) -> list[dict[str, Any]]:
    """Families of models, and settings of the engine."""
    common = {"layout": layout, "steps": 2}
    jobs = [{**common, "settings": FAMILIES[name]} for name in families]
    return [*jobs, {**common, "settings": VARIANTS["tied grouped"], "options": OPTIONS}]


@cache
def truth() -> list[dict[str, Any]]:
    """What one process finds on the CPU, of each family and at last of other settings."""
    (found,) = run_processes(1, RUNS, "curves", jobs=jobs_of("data=1", FAMILIES))
    return found  # type: ignore[no-any-return]


def check_training(layouts: dict[str, Iterable[str]]) -> None:
    """Losses and gradient norms of two steps, of families under layouts of as many devices."""
    expected = dict(zip([*FAMILIES, "settings"], truth(), strict=True))
    names = [name for families in layouts.values() for name in (*families, "settings")]
    jobs = [job for layout, families in layouts.items() for job in jobs_of(layout, families)]
    count = Layout.parse(next(iter(layouts))).world_size
    for found in run_on_rig(count, RUNS, "curves", jobs=jobs, device=None):
        for name, many in zip(names, found, strict=True):
            for what in ("losses", "norms"):
                assert many[what] == pytest.approx(expected[name][what], rel=TOLERANCE), name


@pytest.mark.parametrize("count", [1, 2])
def test_engines_train_as_on_the_cpu(count: int) -> None:
    """Every family on one device and on two, and each layout."""
    check_training({layout: SAMPLE[layout] for layout in LAYOUTS[count]})


@pytest.mark.slow
def test_engines_train_every_family_under_every_layout_as_on_the_cpu() -> None:
    """What the sample leaves to other layouts, too."""
    check_training(dict.fromkeys(LAYOUTS[2], FAMILIES))


def test_what_one_layout_saves_another_loads(tmp_path: Path) -> None:
    """Checkpoints, model folders, evaluation and generation: each layout reads another's."""
    settings, folder = VARIANTS["tied grouped"], str(tmp_path)
    for count, layouts in LAYOUTS.items():
        run_on_rig(
            count,
            RUNS,
            "save_and_answer",
            layouts=layouts,
            settings=settings,
            folder=folder,
            device=None,
        )
    every = [layout for layouts in LAYOUTS.values() for layout in layouts]
    before = dict(zip(every, [every[-1], *every], strict=False))
    found = []
    for count, layouts in LAYOUTS.items():
        jobs = [(before[layout], layout) for layout in layouts]
        ranks = run_on_rig(
            count,
            RUNS,
            "load_and_answer",
            jobs=jobs,
            settings=settings,
            folder=folder,
            device=None,
        )
        found += ranks[0]
    for answer in found[1:]:
        assert answer["next"][0] == pytest.approx(found[0]["next"][0], rel=TOLERANCE)
        assert answer["greedy"][0] == found[0]["greedy"][0]


@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_schedules_are_measured_and_steps_recorded(layout: str) -> None:
    """Times are taken with the device's own events, and gathered over its own groups."""
    first, second = run_on_rig(2, DEVICE_RUNS, "measured", layout=layout)
    assert first == second
    assert all(first["times"])


def test_a_module_of_the_users_own_trains() -> None:
    """Its weights and buffers move to the device and are split there."""
    for layout in ("data=2", "tensor=2"):
        first, second = run_on_rig(2, DEVICE_RUNS, "own_model", layout=layout)
        assert first == second


@pytest.mark.parametrize("layout", ["data=1", *LAYOUTS[2]])
def test_trainers_stop_and_go_on(layout: str, corpus: Path, tmp_path: Path) -> None:
    """A run in two parts is one run: three steps, whose last loss is below the first."""
    count = 1 if layout == "data=1" else 2
    found = run_on_rig(
        count, DEVICE_RUNS, "trained", corpus=str(corpus), output=str(tmp_path), layout=layout
    )
    assert [each["step"] for each in found] == [3] * count
    losses = found[0]["losses"]  # the first process speaks for all
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert found[0]["held out"] is not None


def test_the_command_trains_on_the_best_device(corpus: Path, tmp_path: Path) -> None:
    """Under torchrun, each process on a device of its own."""
    run = write_run(tmp_path / "run.toml", corpus, steps=2, device=None)
    typed = words(run, 2, "--set", "parallel_config.data=2")
    done = run_command_on_rig(typed, variables=environment(), imports=IMPORTS)
    assert done.returncode == 0, done.stderr
