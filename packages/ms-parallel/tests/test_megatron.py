"""A `torch_dist` checkpoint written by the real Megatron-Core.

`MS_MEGATRON_PYTHON` is the Python of its virtual environment; `nox -s megatron` creates both.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from megatron_process import SIZES, VOCABULARY

from ms_parallel import AdamWConfig, Engine, checkpoint
from ms_parallel.models import architecture

PYTHON = os.environ.get("MS_MEGATRON_PYTHON", "")
TOLERANCE = 1e-5
"""Absolute tolerance for logits of magnitude 2; float32 sums are computed in another order."""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="needs Megatron-Core; run nox -s megatron")
def test_logits_agree_with_megatrons(tmp_path: Path) -> None:
    """Stacked layers, fused projections and a padded vocabulary."""
    folder = tmp_path / "iter_0000100"
    script = Path(__file__).with_name("megatron_process.py")
    command = [PYTHON, str(script), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
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
    engine = Engine(architecture("llama", sizes), optimizer=AdamWConfig(learning_rate=1e-3))
    state = engine.state_dict()
    assert checkpoint.load_distributed(folder, engine.config, state).step == 0
    engine.load_state_dict(state)
    expected = torch.load(folder.with_suffix(".pt"), weights_only=True)
    with torch.no_grad():
        logits = engine.module(expected["tokens"])
    assert logits.abs().max() > 1
    difference = logits - expected["logits"][..., :VOCABULARY]
    assert difference.abs().max() < TOLERANCE
