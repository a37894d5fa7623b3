"""Models that transformers builds train under any layout as they would alone in plain torch."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from foreign_models import FAMILIES, alone, by_hand
from processes import run_processes
from runs import global_batch
from transformers import AutoModelForCausalLM

CHILD = Path(__file__).with_name("foreign_models.py")
STEPS = 10


def test_a_model_of_transformers_trains_over_data_as_alone(tmp_path: Path) -> None:
    """Ten steps of packed rows equal plain torch on each document; the folder opens again."""
    expected = by_hand("llama", tmp_path / "begin", STEPS)
    saved = str(tmp_path / "saved")
    job = {"layout": "data=2", "steps": STEPS, "folder": str(tmp_path / "begin"), "save": saved}
    for (result,) in run_processes(2, CHILD, "curves", jobs=[job]):
        # Sums over rows in another order, in float32, for ten steps.
        assert result["losses"] == pytest.approx(expected, abs=1e-5)
    begun, ended = (AutoModelForCausalLM.from_pretrained(f) for f in (tmp_path / "begin", saved))
    batch = global_batch(0)
    with torch.no_grad():
        assert not torch.equal(alone(begun, batch), alone(ended, batch))
