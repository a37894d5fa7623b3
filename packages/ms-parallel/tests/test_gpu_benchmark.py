"""The GPU benchmark runs at tiny sizes on a CPU."""

import json
from pathlib import Path

from processes import run_command

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def test_all_variants_are_measured(tmp_path: Path) -> None:
    """The plain loop and the default start with the loss of random tokens and write results."""
    variants = ["--variant", "plain", "--variant", "default"]
    ended = run_command([str(SCRIPT), "--tiny", *variants, "--out", str(tmp_path)])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [result["variant"] for result in results] == ["plain", "default"]
    for result in results:
        assert abs(result["first_loss"] - 6.24) < 0.05  # log 512
        assert result["tokens_per_s"] > 0
