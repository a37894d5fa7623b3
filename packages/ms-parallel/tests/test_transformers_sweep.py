"""A sample of the sweep over transformers models: every coarse check passes or is refused."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from processes import run_command
from safetensors.torch import load_file

from ms_parallel import Engine, Layout, LayoutError, ModelError
from ms_parallel.models import TransformersModel
from ms_parallel.models.family import family_of
from ms_parallel.models.huggingface.small import small_model
from ms_parallel.proof.subject import open_subject

SWEEP = Path(__file__).parents[1] / "benchmarks" / "transformers_sweep.py"
SAMPLE = ("stablelm", "lfm2", "zamba2")
"""Attention with partial rotary tables, convolutions, and hybrid layers that take two masks."""
CELLS = 8
"""Number of coarse checks per class."""


@pytest.mark.timeout(300)
def test_a_sample_of_transformers_models_passes_every_coarse_check(
    tmp_path: Path,
) -> None:
    """Logits, packed rows, gradients, both loaders, saving and generation."""
    file = tmp_path / "cells.json"
    run = run_command([str(SWEEP), *SAMPLE, "--coarse", "--json", str(file)])
    assert run.returncode == 0, run.stdout + run.stderr
    cells = json.loads(file.read_text())["cells"]
    states = {
        model_type: {name: cell["state"] for name, cell in row.items()}
        for model_type, row in cells.items()
    }
    assert states.keys() == set(SAMPLE)
    for row in states.values():
        assert len(row) == CELLS
        assert set(row.values()) == {"right"}


@pytest.mark.parametrize(
    "model_type",
    ["axk1", "cwm", "deepseek_v3", "dots1", "gemma3n_text", "ministral", "youtu", "zamba2"],
)
def test_transformers_runs_small_models_with_dependent_widths(model_type: str) -> None:
    """These types need a reference for comparison."""
    settings = small_model(TransformersModel({"model_type": model_type})).settings
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(settings, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.arange(10)[None], use_cache=False, return_dict=True).logits
    assert logits.shape == (1, 10, settings.vocab_size)


def generate(model_type: str) -> list[int]:
    """Generate 3 tokens with a small model."""
    engine = Engine(small_model(TransformersModel({"model_type": model_type})), device="cpu")
    (generated,) = engine.generate([[3, 4, 5]], max_new_tokens=3, temperature=0.0, stop_token=None)
    return list(generated)


def test_a_model_that_uses_its_cache_in_an_unknown_way_is_refused() -> None:
    """Dory copies the layers of its cache for each loop."""
    with pytest.raises(ModelError, match="uses 'layers' of its cache, which is not supported"):
        generate("dory")


def test_generation_uses_no_deprecated_argument_of_transformers() -> None:
    """The argument for the cache was renamed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert len(generate("stablelm")) == 3


@pytest.mark.parametrize("model_type", ["got_ocr2", "gemma3"])
def test_the_text_part_of_a_multimodal_model_is_shrunk(model_type: str) -> None:
    """Its sizes are in a nested configuration."""
    settings = small_model(TransformersModel({"model_type": model_type})).settings
    assert (settings.hidden_size, settings.vocab_size) == (32, 48)
    assert settings.num_hidden_layers <= 4


def test_initial_weights_have_the_constants_of_constructors(tmp_path: Path) -> None:
    """The slopes of xIELU and its buffers, which no initialization rule covers."""
    config = small_model(TransformersModel({"model_type": "apertus"}))
    Engine(config, device="cpu").save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    auto: Any = transformers.AutoModelForCausalLM
    expected = auto.from_config(config.settings).state_dict()
    names = [name for name in expected if ".act_fn." in name]
    assert len(names) == 4 * config.num_hidden_layers
    for name in names:
        torch.testing.assert_close(saved[name].reshape(-1), expected[name].reshape(-1))


def test_initial_weights_follow_the_rule_of_the_outermost_module() -> None:
    """AFMoE's router starts at zero, and GPT-2 scales the ends of residual branches down."""
    zero = Engine(small_model(TransformersModel({"model_type": "afmoe"})), device="cpu")
    gates = [value for name, value in zero.parameters.items() if ".router.gate." in name]
    assert gates
    assert not any(value.any() for value in gates)
    config = small_model(TransformersModel({"model_type": "gpt2"}), spread=0.2)
    scaled = Engine(config, device="cpu").parameters["transformer.h.0.mlp.c_proj.weight"]
    expected = 0.2 / (2 * config.num_hidden_layers) ** 0.5
    assert float(scaled.detach().std()) == pytest.approx(expected, rel=0.1)


def test_buffers_computed_by_an_outer_modules_rule_are_set() -> None:
    """Falcon-H1's multipliers along the width of its mixers."""
    engine = Engine(small_model(TransformersModel({"model_type": "falcon_h1"})), device="cpu")
    tokens = torch.arange(10)[None]
    logits = engine.evaluate(
        {"tokens": tokens, "targets": tokens}, lambda output, _: output.logits()
    )
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize(
    ("model_type", "refused"), [("gemma3n_text", True), ("gemma4_text", False)]
)
def test_a_model_that_reads_all_features_between_split_layers_is_not_split(
    model_type: str, refused: bool
) -> None:
    """Gemma 3n keeps activations above a quantile of all features; ranks have only half."""
    config = small_model(TransformersModel({"model_type": model_type}))
    family, layout = family_of(config), Layout.parse("tensor=2")
    if not refused:
        family.check_layout(config, layout)
        return
    with pytest.raises(LayoutError, match=r"Gemma3nTextMLP has an operation over all features"):
        family.check_layout(config, layout)


def test_prove_refuses_a_type_that_transformers_does_not_run() -> None:
    """LFM2-MoE has no default for the types of its layers."""
    with pytest.raises(ModelError, match="transformers cannot run a small lfm2_moe"):
        open_subject("lfm2_moe")
