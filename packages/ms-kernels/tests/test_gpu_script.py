"""The accelerator benchmark script on a machine without an accelerator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra cuda is not installed")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def run(*arguments):
    """Run the script in a subprocess, as a user would."""
    command = [sys.executable, str(SCRIPT), *arguments]
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_dry_run_covers_every_section(tmp_path):
    """All our kernels run interpreted, and a peer that fails reports its error."""
    process = run("--dry", "--out", str(tmp_path / "table.md"))
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    table = (tmp_path / "table.md").read_text()
    assert table == process.stdout
    assert table.count("\n## ") == 9
    assert "all passed: True" in table
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    interpreted = {row[0] for row in rows if "triton" in row}
    assert interpreted == {
        *("rms_norm", "add_rms_norm", "layer_norm", "rotary", "swiglu", "geglu", "cross_entropy"),
        *("permute_tokens", "unpermute_tokens", "causal_conv1d"),
        *("decode_attention", "grouped_matmul", "gated_delta_rule"),
    }
    # cuDNN has no attention on a CPU: its row names the error, and the run still passes.
    (failed_row, *_) = [row for row in rows if "CUDNN_ATTENTION" in row]
    assert failed_row[3] == "failed"
    assert "RuntimeError: " in failed_row[4]


def test_without_an_accelerator_it_exits_with_one_line():
    """Exit code 2."""
    import torch

    if torch.accelerator.is_available():
        pytest.skip("an accelerator is available")
    process = run()
    assert process.returncode == 2
    assert len(process.stdout.splitlines()) == 1
