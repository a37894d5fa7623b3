"""A sample of the sweep over transformers' models: every coarse check is right or refused."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ms_parallel import Engine, ModelError
from ms_parallel.models import TransformersModel
from ms_parallel.models.foreign.small import small_model

SWEEP = Path(__file__).parents[1] / "benchmarks" / "transformers_sweep.py"
SAMPLE = ("stablelm", "lfm2", "zamba2")
"""Attention with partial rotary tables, convolutions, and hybrid layers that take two masks."""
CELLS = 8
"""Coarse checks of a class."""


@pytest.mark.timeout(300)
def test_a_sample_of_transformers_models_has_the_same_numbers_in_every_coarse_check(
    tmp_path: Path,
) -> None:
    """Logits, packed rows, gradients, both loaders, saving and generation."""
    file = tmp_path / "cells.json"
    command = [sys.executable, str(SWEEP), *SAMPLE, "--coarse", "--json", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    cells = json.loads(file.read_text())["cells"]
    states = {
        kind: {name: cell["state"] for name, cell in row.items()} for kind, row in cells.items()
    }
    assert states.keys() == set(SAMPLE)
    for row in states.values():
        assert len(row) == CELLS
        assert set(row.values()) == {"right"}


@pytest.mark.parametrize("kind", ["axk1", "deepseek_v3", "youtu", "zamba2"])
def test_transformers_runs_small_models_whose_widths_depend_on_others(kind: str) -> None:
    """Otherwise there would be nothing to compare these types with."""
    settings = small_model(TransformersModel({"model_type": kind})).settings
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(settings, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.arange(10)[None], use_cache=False, return_dict=True).logits
    assert logits.shape == (1, 10, settings.vocab_size)


def generate(kind: str) -> list[int]:
    """Generate 3 tokens with a small model."""
    engine = Engine(small_model(TransformersModel({"model_type": kind})), device="cpu")
    (made,) = engine.generate([[3, 4, 5]], max_new_tokens=3, temperature=0.0, stop_token=None)
    return list(made)


def test_a_model_that_uses_its_cache_in_an_unknown_way_is_refused() -> None:
    """Dory copies the layers of its cache for each loop."""
    with pytest.raises(ModelError, match="asks its cache for 'layers', which is not supported"):
        generate("dory")


def test_generation_uses_no_deprecated_argument_of_transformers() -> None:
    """The argument for the cache was renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert len(generate("stablelm")) == 3


@pytest.mark.parametrize("kind", ["got_ocr2", "gemma3"])
def test_the_text_part_of_a_model_with_other_inputs_becomes_small(kind: str) -> None:
    """Its sizes are in a configuration within the configuration."""
    settings = small_model(TransformersModel({"model_type": kind})).settings
    assert (settings.hidden_size, settings.vocab_size) == (32, 48)
    assert settings.num_hidden_layers <= 4
