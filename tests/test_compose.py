"""The loops of docs/compose.md and docs/parallel/own-model.md run as scripts, under layouts."""

import os
import re
import subprocess
import sys
from pathlib import Path

from packages import ROOT


def loop(page: str) -> str:
    """The script of a page."""
    text = (ROOT / "docs" / page).read_text()
    (script,) = re.findall(r'```python\n("""loop\.py.*?)```', text, flags=re.DOTALL)
    return str(script)


def run(folder: Path, *launcher: str, **variables: str) -> str:
    """What a launch prints; its last line tells the step and the loss."""
    sources = os.pathsep.join(str(path) for path in ROOT.glob("packages/*/src"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": sources, **variables}
    done = subprocess.run(
        [sys.executable, *launcher, "loop.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_goes_on_from_one_process_to_two(tmp_path: Path) -> None:
    """Forty steps in two launches of two layouts; the second begins where the first stopped."""
    (tmp_path / "loop.py").write_text(loop("compose.md"))
    alone = re.search(r"step (\d+): loss ([\d.]+)", run(tmp_path))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = re.search(r"step (\d+): loss ([\d.]+)", run(tmp_path, *torchrun))
    assert alone is not None
    assert both is not None
    assert (alone[1], both[1]) == ("20", "40")
    assert float(both[2]) < float(alone[2]) < 6.3  # the logarithm of 512 tokens is 6.24
    names = {path.name for path in tmp_path.iterdir()}
    assert {"events", "recorded-0.ring", "recorded-1.ring", "checkpoints", "shards"} <= names


def test_a_loop_around_an_own_model_continues_under_each_layout_of_its_page(
    tmp_path: Path,
) -> None:
    """Twenty steps per launch; each layout opens the checkpoint of the one before."""
    (tmp_path / "loop.py").write_text(loop("parallel/own-model.md"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    layouts = ("data=2", "tensor=2", "pipeline=2")
    printed = [run(tmp_path), *(run(tmp_path, *torchrun, LAYOUT=each) for each in layouts)]
    found = [re.search(r"step (\d+): loss ([\d.]+)", text) for text in printed]
    steps, losses = zip(*(each.groups() for each in found if each), strict=True)
    assert steps == ("20", "40", "60", "80")
    assert sorted(map(float, losses), reverse=True) == [float(loss) for loss in losses]
