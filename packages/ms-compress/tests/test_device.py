"""Every method, export and command on a device that is not the CPU.

The device computes like the CPU; a tensor on the wrong device, or a collective on the wrong group,
raises (see `tests/rig/` in the repository root).
"""

from pathlib import Path

import pytest
from folders import write_run
from ms_rig import run_on_rig
from processes import run_processes

HERE = Path(__file__).parent
RUNS, DEVICE_RUNS = HERE / "runs.py", HERE / "device_runs.py"


def test_methods_match_the_cpu(tmp_path: Path) -> None:
    """QAT, GPTQ, pruning, and every target's export, each verified in its runtime."""
    (results,) = run_on_rig(1, DEVICE_RUNS, "perplexities", folder=str(tmp_path))
    # Attention sums in another order, which may move an input over a border between codes, and
    # the tokens that judge a rounding are sampled with the device's random generator.
    tolerances = {"gptq by loss": 0.1}
    for name, (on_device, on_cpu) in results.items():
        assert on_device == pytest.approx(on_cpu, rel=tolerances.get(name, 1e-2)), name


def test_a_student_trains_on_its_teachers_device() -> None:
    """Hidden states and logits of both stay on the device."""
    assert run_on_rig(1, DEVICE_RUNS, "student_stays_on_device") == [True]


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_layouts_train_and_export_as_one_process(axis: str, tmp_path: Path) -> None:
    """Losses of three QAT steps under a layout of two devices, and the exported files."""
    settings = {"scheme": "ct.int4_g32", "sparse": True}
    single_folder, layout_folder = str(tmp_path / "whole"), str(tmp_path / "split")
    (single,) = run_processes(1, RUNS, "train", layout={}, folder=single_folder, **settings)
    first, second = run_on_rig(
        2, RUNS, "train", layout={axis: 2}, folder=layout_folder, device=None, **settings
    )
    assert first["losses"] == second["losses"] == pytest.approx(single["losses"], abs=2e-6)


def test_commands_run_on_the_accelerator(tmp_path: Path) -> None:
    """Each command loads its model on the device and writes its output."""
    run = write_run(tmp_path)
    calls = {
        "qat": ["scheme=ort.matmulnbits", "start=gptq", f"teacher={tmp_path}/model"],
        "quantize": ["scheme=ct.int4_g32", "method=gptq", "by_loss=true", "act_order=true"],
        "prune": ["pattern=2:4", "method=wanda"],
        "distill": ["layers=1", "inner=128"],
    }
    lines = []
    for name, keys in calls.items():
        arguments = [*keys, f"output_dir={tmp_path}/{name}"]
        lines.append([name, *(part for key in arguments for part in ("--set", key))])
    assert run_on_rig(1, DEVICE_RUNS, "commands", run=str(run), calls=lines) == [[0] * 4]
