"""A real ms-parallel training under `ms-profile run`; neither package imports the other.

Their common interface is torch: the engine's update is a step of `torch.optim.Optimizer`, or is
marked by `mark_step` where training steps without an optimizer.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from ms_profile import Kind, read_events, read_ring
from ms_profile.log.manifest import read_ranks

UPDATES = 8
SCRIPT = f"""
import torch
from ms_parallel import Engine, Layout, NextTokenLoss
from ms_parallel.models import architecture

sizes = {{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2}}
layout = Layout.parse(__import__("sys").argv[1])
engine = Engine(architecture("llama", sizes), layout, device="cpu", microbatch_size=1)
tokens = torch.randint(64, (2, 16))
for _ in range({UPDATES}):
    engine.step({{"tokens": tokens, "targets": tokens}}, NextTokenLoss())
"""


@pytest.mark.parametrize(
    ("layout", "ranks"), [("data=1", 1), pytest.param("pipeline=2", 2, marks=pytest.mark.slow)]
)
def test_an_unmodified_ms_parallel_training_is_recorded(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    """Every update is a step in manifest, log, ring and traces, and its modules are recorded."""
    script, folder = tmp_path / "train.py", tmp_path / "results"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(script)]
    command += ["--output-dir", str(folder), "--skip", "1", "--active", "2", "--windows", "1"]
    command += ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    subprocess.run([*command, "--", layout], check=True, timeout=300)
    rank_manifests = read_ranks(folder)
    assert [(rank.steps, rank.exit_code) for rank in rank_manifests] == [(UPDATES, 0)] * ranks
    assert all(sum(trace.steps for trace in rank.traces) == 2 for rank in rank_manifests)
    for rank in range(ranks):
        events = [event for event in read_events(folder) if event.rank == rank]
        assert [event.step for event in events if event.kind == "step"] == list(range(UPDATES))
        spans = read_ring(folder / "ring" / f"rank-{rank:05d}.ring").spans
        for kind in (Kind.STEP, Kind.FORWARD, Kind.BACKWARD):
            assert (spans["kind"] == kind).sum() >= UPDATES
        assert (spans["kind"] == Kind.MODULE).any()
