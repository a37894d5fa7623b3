"""The GPU benchmark runs at tiny sizes on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def test_each_way_of_training_is_measured(tmp_path: Path) -> None:
    """The plain loop and the default start from losses of random tokens, and both print a row."""
    variants = ["--variant", "plain", "--variant", "default"]
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--tiny", *variants, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [each["variant"] for each in results] == ["plain", "default"]
    for each in results:
        assert abs(each["first_loss"] - 6.24) < 0.05  # log 512
        assert each["tokens_per_s"] > 0
