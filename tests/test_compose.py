"""The loop of docs/compose.md runs as a script, on one process and on two."""

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from packages import ROOT


def loop() -> str:
    """The page's script."""
    page = (ROOT / "docs" / "compose.md").read_text()
    (script,) = re.findall(r'```python\n("""loop\.py.*?)```', page, flags=re.DOTALL)
    return str(script)


def run(folder: Path, *launcher: str) -> str:
    """What a launch prints; its last line tells the step and the loss."""
    sources = os.pathsep.join(str(path) for path in ROOT.glob("packages/*/src"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": sources}
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
    (tmp_path / "loop.py").write_text(loop())
    alone = re.search(r"step (\d+): loss ([\d.]+)", run(tmp_path))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    both = re.search(r"step (\d+): loss ([\d.]+)", run(tmp_path, *torchrun))
    assert alone is not None
    assert both is not None
    assert (alone[1], both[1]) == ("20", "40")
    assert float(both[2]) < float(alone[2]) < 6.3  # the logarithm of 512 tokens is 6.24
    names = {path.name for path in tmp_path.iterdir()}
    assert {"events", "recorded-0.ring", "recorded-1.ring", "checkpoints", "shards"} <= names
