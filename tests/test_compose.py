"""The loops of docs/compose.md and docs/parallel/own-model.md run as scripts, under layouts."""

import os
import re
from pathlib import Path

import pytest
from processes import run_command

from packages import ROOT


def loop(page: str) -> str:
    """Extract the script of a page."""
    text = (ROOT / "docs" / page).read_text()
    (script,) = re.findall(r'```python\n("""loop\.py.*?)```', text, flags=re.DOTALL)
    return str(script)


def run(folder: Path, *launcher: str, **variables: str) -> str:
    """Output of a launch; its last line has the step and the loss."""
    sources = os.pathsep.join(str(path) for path in ROOT.glob("packages/*/src"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": sources, **variables}
    result = run_command([*launcher, "loop.py"], folder=folder, environment=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_loop_resumes_from_one_process_with_two(tmp_path: Path) -> None:
    """Two launches of 20 steps with two layouts; the second resumes from the first."""
    (tmp_path / "loop.py").write_text(loop("compose.md"))
    first = re.search(r"step (\d+): loss ([\d.]+)", run(tmp_path))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    second = re.search(r"step (\d+): loss ([\d.]+)", run(tmp_path, *torchrun))
    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == ("20", "40")
    assert float(second[2]) < float(first[2]) < 6.3  # the logarithm of 512 tokens is 6.24
    names = {path.name for path in tmp_path.iterdir()}
    assert {"events", "recorded-0.ring", "recorded-1.ring", "checkpoints", "shards"} <= names


@pytest.mark.slow
def test_a_loop_around_a_custom_model_continues_under_each_layout_of_its_page(
    tmp_path: Path,
) -> None:
    """Twenty steps per launch; each layout resumes from the previous layout's checkpoint."""
    (tmp_path / "loop.py").write_text(loop("parallel/own-model.md"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    layouts = ("data=2", "tensor=2", "pipeline=2")
    outputs = [run(tmp_path), *(run(tmp_path, *torchrun, LAYOUT=layout) for layout in layouts)]
    matches = [re.search(r"step (\d+): loss ([\d.]+)", text) for text in outputs]
    steps, losses = zip(*(match.groups() for match in matches if match), strict=True)
    assert steps == ("20", "40", "60", "80")
    assert sorted(map(float, losses), reverse=True) == [float(loss) for loss in losses]
