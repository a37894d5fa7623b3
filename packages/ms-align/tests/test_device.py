"""All trainers, engines and generators on a device other than the CPU.

The device computes as the CPU does; a tensor on the wrong one, or a collective on the wrong group,
raises (see `tests/rig/` at the repository's top).
"""

from pathlib import Path
from typing import Any

import pytest
from ms_rig import run_on_rig

from .layout_run import run as run_here

RUNS = Path(__file__).with_name("device_runs.py")
AXES = ("data", "tensor", "pipeline")


def on_rig(count: int, function: str, **arguments: Any) -> Any:
    """Run a function on the rig and return the result of the first process."""
    return run_on_rig(count, RUNS, function, **arguments)[0]


def test_online_trainers_run_on_a_device(tmp_path: Path) -> None:
    """PPO with value, reference and reward models; GRPO, RLOO; adapters; after a resume."""
    results = on_rig(1, "run_online", folder=str(tmp_path))
    assert all(len(losses) == 2 for losses in results.values())


def test_responses_equal_those_on_the_cpu() -> None:
    """Every type of model, with and without fused weights."""
    assert all(on_rig(1, "compare_generation").values())


def test_the_host_waits_once_in_eight_tokens_of_a_response() -> None:
    """Responses of 25 tokens need two more checks than responses of 9, for every type of model.

    To find stop strings, a check reads the lengths and the tokens as well.
    """
    for name, (short, long) in on_rig(1, "count_generation_waits", lengths=[9, 25]).items():
        assert long - short == (6 if name == "strings" else 2), name


def test_a_reward_model_learns_and_scores(sets: Path, tmp_path: Path) -> None:
    """The saved model gives the same scores as the trained one."""
    assert on_rig(1, "train_reward_model", sets=str(sets), folder=str(tmp_path))["same"]


def test_adapters_are_written_read_and_merged(tmp_path: Path) -> None:
    """The logits stay the same."""
    assert on_rig(1, "check_adapters", folder=str(tmp_path)) == {"read": True, "merged": True}


@pytest.fixture(scope="module")
def reference(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return the results of one process on the CPU."""
    return run_here(sets, tmp_path_factory.mktemp("alone"), None)


@pytest.mark.parametrize(
    "axis", ["one", "data", *(pytest.param(a, marks=pytest.mark.slow) for a in AXES[1:])]
)
def test_sft_and_dpo_losses_equal_those_on_the_cpu(
    sets: Path, tmp_path: Path, reference: dict[str, list[float]], axis: str
) -> None:
    """In one process, and under a layout for two."""
    layout = None if axis == "one" else {axis: 2}
    count = 1 if layout is None else 2
    actual = on_rig(
        count, "run_offline_trainers", sets=str(sets), folder=str(tmp_path), layout=layout
    )
    for name, values in actual.items():
        tolerance = 1e-4 if "grad_norm" in name else 1e-5  # as in test_layouts.py
        assert values == pytest.approx(reference[name], rel=tolerance, abs=tolerance), name


@pytest.fixture(scope="module")
def rollouts(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of PPO and GRPO in one process on the device."""
    return on_layout(sets, tmp_path_factory.mktemp("one"), {})


def on_layout(sets: Path, folder: Path, layout: dict[str, int]) -> Any:
    """Return the losses under a layout."""
    (folder / "start").symlink_to(sets / "model")
    count = 2 if layout else 1
    return on_rig(count, "run_online_layouts", folder=str(folder), layout=layout)


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param("data", marks=pytest.mark.slow),
        pytest.param("tensor", marks=pytest.mark.slow),
        "pipeline",
    ],
)
def test_two_processes_give_the_losses_of_a_single_process(
    sets: Path, tmp_path: Path, rollouts: Any, axis: str
) -> None:
    """PPO and GRPO, each with a resume in between."""
    actual = on_layout(sets, tmp_path, {axis: 2})
    for name, losses in rollouts.items():
        assert len(losses) == 2
        assert all(losses)
        assert actual[name] == pytest.approx(losses, rel=1e-4, abs=1e-5), name
