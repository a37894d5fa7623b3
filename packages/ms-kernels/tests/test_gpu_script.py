"""The script that measures accelerators, where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra cuda is not installed")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def run(*arguments):
    """Run the script in a process of its own, as a user would."""
    command = [sys.executable, str(SCRIPT), *arguments]
    plain = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, capture_output=True, text=True, env=plain)


@pytest.mark.slow
def test_a_dry_run_goes_through_every_section(tmp_path):
    """Nothing of ours fails, each kernel is interpreted, and a peer that fails says why."""
    ended = run("--dry", "--out", str(tmp_path / "table.md"))
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    told = (tmp_path / "table.md").read_text()
    assert told == ended.stdout
    assert told.count("\n## ") == 9
    assert "all held: True" in told
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines()]
    interpreted = {row[0] for row in rows if "triton" in row}
    assert interpreted == {
        *("rms_norm", "add_rms_norm", "layer_norm", "rotary", "swiglu", "geglu", "cross_entropy"),
        *("permute_tokens", "unpermute_tokens", "causal_conv1d", "adamw_step"),
        *("decode_attention", "quantized_linear", "grouped_matmul", "gated_delta_rule"),
    }
    # cuDNN has no attention on a CPU: the row names the error, and the run holds all the same.
    (absent, *_) = [row for row in rows if "CUDNN_ATTENTION" in row]
    assert absent[3] == "failed"
    assert "RuntimeError: " in absent[4]


def test_without_an_accelerator_it_says_so():
    """Exit code 2, one line."""
    import torch

    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    ended = run()
    assert ended.returncode == 2
    assert len(ended.stdout.splitlines()) == 1
