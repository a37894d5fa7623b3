"""AWQ and SmoothQuant: exact folding of scales, gains, export, and resuming after a kill."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from folders import write_run
from forks import exit_status, fork
from models import FULL, SLIDING, decoder, deepseek, gemma3, llama, qwen3, tokens
from torch import nn

from ms_compress import (
    ConfigError,
    awq,
    calibrate_inputs,
    export,
    open_runtime,
    qat,
    smoothquant,
)
from ms_compress.cli import main
from ms_compress.evaluation.divergence import compare_logits
from ms_compress.methods.calibration import walk
from ms_compress.methods.folding import Fold, find_folds
from ms_compress.models.logits import model_logits, next_token_logits
from ms_compress.quantization.rounding import best_factor, round_weight
from ms_compress.targets.rules import scheme
from ms_compress.training.checkpoint import BlockFiles


def folds_of(model: nn.Module) -> dict[str, Fold]:
    """Return the folds of all decoder layers by the producer's name."""
    folds: dict[str, Fold] = {}
    targets = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    walk(
        model,
        [tokens(1, 8)],
        lambda total, inputs: inputs,
        lambda block: folds.update(
            (fold.name, fold) for fold in find_folds(block.name, block.module, lambda: block.run(0))
        ),
        targets,
    )
    return folds


def gemma() -> nn.Module:
    """Its norms add 1 to their weights, and a second norm follows each branch."""
    return gemma3(SLIDING, FULL)


@pytest.mark.parametrize("build", [decoder, llama, qwen3, gemma])
def test_folded_scales_leave_the_float_model_unchanged(build: Callable[[], nn.Module]) -> None:
    """In float64 up to rounding, for two norms and two linear layers of each decoder layer."""
    model = build().double()
    text = tokens()
    with torch.no_grad():
        expected = next_token_logits(model, text)
        folds = folds_of(model)
        assert len(folds) == 2 * 4
        generator = torch.Generator().manual_seed(0)
        original = {name: value.clone() for name, value in model.state_dict().items()}
        for fold in folds.values():
            fold.apply(torch.exp(torch.randn(fold.count, generator=generator)))
        changed = next_token_logits(model, text)
    # All matrices of a decoder layer and its two norms have changed.
    state = model.state_dict()
    assert sum(not torch.equal(state[name], value) for name, value in original.items()) == 2 * 9
    # transformers computes norms in float32, whose rounding depends on nothing that is scaled.
    torch.testing.assert_close(changed, expected, rtol=0, atol=2e-6 if build is gemma else 1e-12)


def test_a_norm_with_other_readers_gets_no_scales(caplog: pytest.LogCaptureFixture) -> None:
    """Experts in one tensor also read the norm, which the test with powers of two detects."""
    model = deepseek()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = set(folds_of(model))
    assert "model.layers.0.post_attention_layernorm" in names
    assert "model.layers.1.post_attention_layernorm" not in names
    assert "model.layers.1.self_attn.kv_a_layernorm" in names
    assert "post_attention_layernorm, whose output is not only read by linear layers" in caplog.text
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def with_outliers(model: nn.Module) -> nn.Module:
    """Make some features of the norms' outputs 30 times larger; the model computes the same."""
    for fold in folds_of(model).values():
        if fold.is_norm:
            scales = torch.ones(fold.count)
            scales[3::37] = 1 / 30
            fold.apply(scales)
    return model


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        pytest.param("ct.int4_g32", (awq,), marks=pytest.mark.slow),
        pytest.param("ct.mxfp4", (awq,), marks=pytest.mark.slow),
        ("ct.w8a8", (awq, smoothquant)),
        pytest.param("ct.nvfp4", (awq, smoothquant), marks=pytest.mark.slow),
    ],
)
def test_scaled_features_bring_a_model_with_outliers_closer_to_the_float_model(
    name: str, methods: tuple[Callable[..., None], ...]
) -> None:
    """Compared with rounding to nearest, on tokens that were not used for calibration."""
    batches, unseen = [tokens(4, 32, seed=seed) for seed in range(2)], tokens(4, seed=99)
    expected = model_logits(decoder(1), unseen)
    rounded = qat(with_outliers(decoder(1)), name)
    calibrate_inputs(rounded, batches)
    rtn = compare_logits(expected, model_logits(rounded, unseen)).kl
    for method in methods:
        for rounding in ("rtn", "gptq"):
            model = with_outliers(decoder(1))
            method(model, name, batches, rounding=rounding)
            assert compare_logits(expected, model_logits(model, unseen)).kl < 0.7 * rtn


def test_scaled_models_are_exported_as_they_compute(tmp_path: Path) -> None:
    """Norms, codes, fitted scales and input scales: transformers gives the same logits."""
    model = with_outliers(decoder(1))
    awq(model, "ct.nvfp4", [tokens(4, 32)], rounding="gptq")
    runtime = open_runtime(export(model, tmp_path / "out"), "ct")
    assert torch.equal(runtime.logits(tokens()), model_logits(model, tokens()))


def test_scales_are_fitted_to_the_output_of_a_group() -> None:
    """With correlated inputs, the sum of a group's products has a smaller error."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 8) @ torch.randn(8, 64) + 0.1 * torch.randn(512, 64)
    weight, int4 = torch.randn(16, 64), scheme("ct.int4_g32")

    def group_errors(importance: torch.Tensor | None) -> float:
        factor = best_factor(weight, int4, importance)
        error = round_weight(weight, int4, factor) - weight  # (16, 64)
        products = [inputs[:, part] @ error[:, part].t() for part in (slice(32), slice(32, 64))]
        return float(torch.stack(products).square().sum())

    hessian = inputs.t() @ inputs
    assert group_errors(hessian) < 0.95 * min(group_errors(hessian.diagonal()), group_errors(None))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("scheme=ct.int4_g32", "method=gptq", "by_loss=true"), marks=pytest.mark.slow),
        ("scheme=ct.nvfp4", "method=awq+gptq"),
        pytest.param(("scheme=ct.w8a8", "method=smoothquant"), marks=pytest.mark.slow),
        ("scheme=ct.int4_g32", "method=autoround", "iters=4"),
    ],
)
def test_a_killed_calibration_resumes_with_the_same_result(
    settings: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed after the first decoder layer; byte for byte the file of an uninterrupted run."""
    run_file = write_run(tmp_path)
    arguments = [part for value in (*settings, "rows=8") for part in ("--set", value)]

    def run_until_killed() -> None:
        save, folder = BlockFiles.save, tmp_path / "out.calibration"

        def save_and_die(self: BlockFiles, name: str, block: nn.Module) -> None:
            save(self, name, block)
            if (folder / "model.layers.0").is_file():
                os.kill(os.getpid(), signal.SIGKILL)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockFiles, "save", save_and_die)
            main(["quantize", str(run_file), *arguments])

    assert exit_status(fork(run_until_killed)) == -signal.SIGKILL
    stored = tmp_path / "out.calibration"
    assert [path.name for path in stored.iterdir()] == ["model.layers.0"]
    capsys.readouterr()
    other = ["--set", "activations=false"]
    assert main(["quantize", str(run_file), *arguments, *other]) == 2
    error = capsys.readouterr().err
    assert "out.calibration belongs to a run with other settings: activations is False" in error
    assert main(["quantize", str(run_file), *arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert not stored.exists()
    elsewhere = ["--set", f"output_dir={tmp_path}/uninterrupted"]
    assert main(["quantize", str(run_file), *arguments, *elsewhere, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kl"] == facts["kl"]
    weights = [tmp_path / name / "model.safetensors" for name in ("out", "uninterrupted")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_damaged_layer_is_named(tmp_path: Path) -> None:
    """It is not used, and the message says what to remove."""
    model = decoder(1)
    block = model.get_submodule("model.layers.0")
    stored = BlockFiles(folder=tmp_path / "out.calibration", identity={"a": "1"})
    assert not stored.load("model.layers.0", block)
    stored.save("model.layers.0", block)
    assert stored.load("model.layers.0", block)
    path = tmp_path / "out.calibration" / "model.layers.0"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.layers\.0 is damaged: .*; remove it to restart"):
        stored.load("model.layers.0", block)
    stored.remove()
    assert not stored.folder.exists()


def test_methods_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 with a remedy, before anything is written."""
    run_file = write_run(tmp_path)
    refused = {
        ("method=smoothquant", "scheme=ct.int4_g32"): "needs a scheme that quantizes inputs",
        ("method=gptq", "scheme=ct.int4_g32", "iters=9"): "iters is only used by AutoRound",
        ("method=awk", "scheme=ct.int4_g32"): "did you mean 'awq'",
        ("method=awq", "scheme=ct.int4_g32", "head=true"): "quantizes only decoder layers",
        ("method=awq", "scheme=ct.int4_g48"): "ct.int4_g48 has groups of 48 weights",
    }
    for settings, message in refused.items():
        arguments = [part for value in settings for part in ("--set", value)]
        assert main(["quantize", str(run_file), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(
        ConfigError, match="rounding must be 'rtn', 'gptq' or 'autoround', got 'up'"
    ):
        awq(decoder(1), "ct.int4_g32", [tokens()], rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="strength must be 0 to 1, got 2"):
        smoothquant(decoder(1), "ct.w8a8", [tokens()], strength=2)
