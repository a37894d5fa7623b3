"""Every method, export and command on a device that is not the CPU.

The device computes as the CPU does; a tensor on the wrong one, or a collective on the wrong group,
raises (see `tests/rig/` at the repository's top).
"""

from pathlib import Path

import pytest
from folders import write_run
from ms_rig import run_on_rig
from processes import run_processes

HERE = Path(__file__).parent
RUNS, DEVICE_RUNS = HERE / "runs.py", HERE / "device_runs.py"


def test_methods_come_to_what_they_come_to_on_the_cpu(tmp_path: Path) -> None:
    """QAT, GPTQ, pruning, and every target's export, each verified in its runtime."""
    (found,) = run_on_rig(1, DEVICE_RUNS, "methods", folder=str(tmp_path))
    # Attention sums in another order, which may move an input over a border between codes; and
    # the tokens by which a rounding is judged are drawn from the device's own random numbers.
    tolerances = {"gptq by loss": 0.1}
    for name, (there, here) in found.items():
        assert there == pytest.approx(here, rel=tolerances.get(name, 1e-2)), name


def test_a_student_learns_where_its_teacher_lies() -> None:
    """On the device, with what both keep of a batch."""
    assert run_on_rig(1, DEVICE_RUNS, "student") == [True]


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_layouts_train_and_export_as_one_process(axis: str, tmp_path: Path) -> None:
    """Losses of three steps of QAT under a layout of two devices, and the exported files."""
    settings = {"scheme": "ct.int4_g32", "sparse": True}
    whole, split = str(tmp_path / "whole"), str(tmp_path / "split")
    (one,) = run_processes(1, RUNS, "train", layout={}, folder=whole, **settings)
    first, second = run_on_rig(
        2, RUNS, "train", layout={axis: 2}, folder=split, device=None, **settings
    )
    assert first["losses"] == second["losses"] == pytest.approx(one["losses"], abs=2e-6)


def test_commands_run_on_the_accelerator(tmp_path: Path) -> None:
    """Each command reads its model to the device and writes what it is asked for."""
    run = write_run(tmp_path)
    calls = {
        "qat": ["scheme=ort.matmulnbits", "start=gptq", f"teacher={tmp_path}/model"],
        "quantize": ["scheme=ct.int4_g32", "method=gptq", "by_loss=true", "act_order=true"],
        "prune": ["pattern=2:4", "method=wanda"],
        "distill": ["layers=1", "inner=128"],
    }
    lines = []
    for name, keys in calls.items():
        given = [*keys, f"output_dir={tmp_path}/{name}"]
        lines.append([name, *(part for key in given for part in ("--set", key))])
    assert run_on_rig(1, DEVICE_RUNS, "commands", run=str(run), calls=lines) == [[0] * 4]
