"""`torch_dist` checkpoints written by the real Megatron-Core.

`MS_MEGATRON_PYTHON` is the Python of its virtual environment; `nox -s megatron` creates both.
"""

import json
import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch
from megatron_process import (
    BETAS,
    LEARNING_RATE,
    SIZES,
    STEPS,
    VOCABULARY,
    WEIGHT_DECAY,
    tokens_of,
)

from ms_parallel import AdamWConfig, CheckpointError, Engine, NextTokenLoss, checkpoint
from ms_parallel.models import architecture

PYTHON = os.environ.get("MS_MEGATRON_PYTHON", "")
ITERATION = f"iter_{STEPS:07d}"
TOLERANCE = 1e-5
"""Absolute tolerance of logits of magnitude 2, and of losses after 20 updates; float32 sums are
computed in another order."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="needs Megatron-Core; run nox -s megatron"),
]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with 40 steps of Megatron-Core in each format, saved after 20."""
    folder = tmp_path_factory.mktemp("megatron")
    script = Path(__file__).with_name("megatron_process.py")
    command = [PYTHON, str(script), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def engine() -> Engine:
    """The same model and optimizer."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": SIZES["hidden_size"],
        "intermediate_size": SIZES["ffn_hidden_size"],
        "num_hidden_layers": SIZES["num_layers"],
        "num_attention_heads": SIZES["num_attention_heads"],
        "num_key_value_heads": SIZES["num_query_groups"],
        "head_dim": SIZES["kv_channels"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
    }
    optimizer = AdamWConfig(
        learning_rate=LEARNING_RATE,
        betas=BETAS,
        # Without Megatron's scheduler, which exempts them, norms are decayed too.
        groups={"*": {"weight_decay": WEIGHT_DECAY}},
        warmup_steps=0,
        max_grad_norm=None,
    )
    return Engine(architecture("llama", sizes), optimizer=optimizer)


@pytest.mark.parametrize("saved_format", ["plain", "fully_reshardable"])
def test_a_run_of_megatron_continues_with_the_same_logits_and_losses(
    megatron: Path, saved_format: str
) -> None:
    """Stacked or separate layers, fused projections, a padded vocabulary, and Adam's moments."""
    folder = megatron / saved_format
    expected = json.loads((folder / "losses.json").read_text())
    ours = engine()
    state = ours.state_dict()
    position = checkpoint.load_distributed(folder / ITERATION, ours.config, state)
    assert position == checkpoint.RunPosition(step=STEPS, tokens=None)
    ours.load_state_dict(state)
    saved = torch.load(folder / "logits.pt", weights_only=True)
    with torch.no_grad():
        logits = ours.module(saved["tokens"])
    assert logits.abs().max() > 1
    difference = logits - saved["logits"][..., :VOCABULARY]
    assert difference.abs().max() < TOLERANCE
    losses = []
    for step in range(STEPS + 1, 2 * STEPS + 1):
        tokens = tokens_of(step)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        losses.append(ours.step(batch, NextTokenLoss()).loss)
    differences = (torch.tensor(losses) - torch.tensor(expected[STEPS:])).abs()
    logging.info("largest difference of %d losses: %.2e", len(losses), differences.max())
    assert len(losses) == len(expected) - STEPS == 20
    assert differences.max() < TOLERANCE
    # The losses fall enough that lost moments would exceed the tolerance.
    assert expected[STEPS] - expected[-1] > 0.1


def test_flat_buffers_are_refused_with_the_option_to_save_with(megatron: Path) -> None:
    """Their order depends on Megatron's allocation; the weights alone load."""
    folder = megatron / "dp_reshardable"
    ours = engine()
    state = ours.state_dict()
    with pytest.raises(CheckpointError, match="save with --dist-ckpt-optim-fully-reshardable"):
        checkpoint.load_distributed(folder / ITERATION, ours.config, state)
    before = {n: t.clone() for n, t in state.items() if n.startswith("optimizer.")}
    position = checkpoint.load_distributed(
        folder / ITERATION, ours.config, state, weights_only=True
    )
    assert position == checkpoint.RunPosition(step=0, tokens=None)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    ours.load_state_dict(state)
    saved = torch.load(folder / "logits.pt", weights_only=True)
    with torch.no_grad():
        difference = ours.module(saved["tokens"]) - saved["logits"][..., :VOCABULARY]
    assert difference.abs().max() < TOLERANCE
