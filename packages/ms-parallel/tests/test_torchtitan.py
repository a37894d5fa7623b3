"""Checkpoints from torchtitan to ms-parallel and back, with the real torchtitan.

`MS_TORCHTITAN_PYTHON` is the Python of its virtual environment; `nox -s torchtitan` creates both.
"""

import json
import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torchtitan_process import (
    DIM,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    LEARNING_RATE,
    MIN_LR_FACTOR,
    THETA,
    VOCABULARY,
    WARMUP,
    tokens_of,
)

from ms_parallel import AdamWConfig, Engine, NextTokenLoss, checkpoint
from ms_parallel.models import architecture
from ms_parallel.training.checkpoints import adamw_groups

PYTHON = os.environ.get("MS_TORCHTITAN_PYTHON", "")
STEPS = 30
TOLERANCE = 1e-5
"""Absolute tolerance of losses after 20 updates; float32 sums are computed in another order."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs torchtitan; run nox -s torchtitan"),
]


def torchtitan(folder: Path, first: int, last: int) -> list[float]:
    """Train the steps after `first`, up to `last`, with torchtitan; return their losses."""
    script = Path(__file__).with_name("torchtitan_process.py")
    command = [PYTHON, str(script), str(folder), str(first), str(last), str(STEPS)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=folder.parent
    )
    assert result.returncode == 0, result.stderr
    losses: list[float] = json.loads(result.stdout.splitlines()[-1])
    return losses


def test_losses_agree_from_torchtitan_to_ms_parallel_and_back(tmp_path: Path) -> None:
    """ms-parallel trains steps 11 to 20; all losses equal a run of torchtitan alone."""
    expected = torchtitan(tmp_path / "titan", 0, STEPS)
    config = architecture(
        "llama",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": DIM,
            "intermediate_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": GROUPS,
            "rope_theta": THETA,
        },
    )
    optimizer = AdamWConfig(
        learning_rate=LEARNING_RATE,
        warmup_steps=WARMUP,
        decay="cosine",
        decay_steps=STEPS,
        final_ratio=MIN_LR_FACTOR,
        groups={"*": {"weight_decay": 0.1}},  # torchtitan decays norm weights too
    )
    engine = Engine(config, optimizer=optimizer)
    state = engine.state_dict()
    position = checkpoint.load_distributed(
        tmp_path / "titan" / "checkpoint" / "step-10", config, state
    )
    assert position == checkpoint.RunPosition(step=10, tokens=10 * 4 * 32)
    engine.load_state_dict(state)
    losses = []
    for step in range(11, 21):
        tokens = tokens_of(step)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        losses.append(engine.step(batch, NextTokenLoss()).loss)
    folder = tmp_path / "back" / "checkpoint" / "step-20"
    folder.parent.mkdir(parents=True)
    checkpoint.save_distributed(
        folder,
        config,
        engine.state_dict(),
        groups=adamw_groups(engine.optimizer),
        tokens=20 * 4 * 32,
    )
    losses += torchtitan(tmp_path / "back", 20, STEPS)
    differences = torch.tensor(losses) - torch.tensor(expected[10:])
    logging.info("largest difference of 20 losses: %.2e", differences.abs().max())
    assert len(losses) == 20
    assert differences.abs().max() < TOLERANCE
    # The losses fall enough that lost moments or other rows would exceed the tolerance.
    assert expected[10] - expected[-1] > 0.3
