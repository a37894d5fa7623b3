"""READMEs' scripts run under the recommended torchrun, `README_RUNS` times (2).

Run by `nox -s readme`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "packages/ms-parallel/README.md")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def blocks(page: str) -> list[str]:
    """Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run(folder: Path, *launcher: str) -> None:
    """Run `train.py` in the folder; fail with its output."""
    result = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES)
def test_the_script_of_a_page_runs_under_torchrun(page: str, tmp_path: Path) -> None:
    """With the number of processes on the page."""
    text = (ROOT / page).read_text()
    launch = re.search(r"torchrun --standalone --nproc-per-node (\d+) train\.py", text)
    assert launch, f"{page} must show how to start its script in several processes"
    (tmp_path / "train.py").write_text(blocks(page)[0])
    for _ in range(int(os.environ.get("README_RUNS", "2"))):
        run(tmp_path, *TORCHRUN, launch[1])
