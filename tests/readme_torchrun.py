"""A README's script under the torchrun that the page recommends, twice. Run by `nox -s readme`."""

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
    """The Python code of a page, block by block."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run(folder: Path, *launcher: str) -> None:
    """Run `train.py` there; fails with what it said."""
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_under_torchrun_where_it_says_so(page: str, tmp_path: Path) -> None:
    """With as many processes as it says, twice."""
    text = (ROOT / page).read_text()
    said = re.search(r"torchrun --standalone --nproc-per-node (\d+) train\.py", text)
    assert said, f"{page} says how its script is started in several processes"
    (tmp_path / "train.py").write_text(blocks(page)[0])
    for _ in range(2):
        run(tmp_path, *TORCHRUN, said[1])
