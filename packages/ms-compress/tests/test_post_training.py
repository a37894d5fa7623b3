"""Rounding and pruning after training: gains from calibration, and refused input."""

from pathlib import Path

import pytest
import torch
from models import SINGLE_LEVEL, decoder, llama, tokens
from torch import Tensor, nn

from ms_compress import CalibrationError, ConfigError, LayerError, export, fit_scales, qat
from ms_compress.methods.gptq import gptq, gptq_weight
from ms_compress.methods.pattern import NOfM
from ms_compress.methods.pruning import (
    GradualPruning,
    keep_zeros,
    mask_zeros,
    masks,
    prune,
    sparsity,
)
from ms_compress.methods.wanda import wanda
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import prepared_layers
from ms_compress.quantization.rounding import best_factor, quantize_weight, round_weight
from ms_compress.quantization.scheme import Scheme
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import open_runtime
from ms_compress.training.distillation import distillation_loss


@pytest.mark.parametrize("name", SINGLE_LEVEL)
def test_gptq_has_a_smaller_output_error_than_rounding(name: str) -> None:
    """For correlated inputs the error of X W^T is smaller than with round-to-nearest."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16) @ torch.randn(16, 128) + 0.1 * torch.randn(512, 128)
    weight, quant_scheme = torch.randn(64, 128), scheme(name)
    rounded, scales = gptq_weight("layer", weight, inputs.t() @ inputs, quant_scheme)
    assert scales.shape == quant_scheme.scale_shape(64, 128)
    gptq_error = (inputs @ (weight - rounded).t()).square().mean()
    rtn_error = (inputs @ (weight - round_weight(weight, quant_scheme)).t()).square().mean()
    assert gptq_error < 0.7 * rtn_error


@pytest.mark.parametrize("name", SINGLE_LEVEL)
def test_fitted_scales_have_the_smallest_error_per_group(name: str) -> None:
    """Never worse than the scheme's default scale, and clearly better at few bits."""
    torch.manual_seed(0)
    weight, quant_scheme = torch.randn(24, 128), scheme(name)
    cost = torch.rand(128)
    for costs in (None, cost):
        factor = best_factor(weight, quant_scheme, costs)
        assert factor.shape == quant_scheme.scale_shape(24, 128)
        best_errors = group_errors(weight, factor, quant_scheme, costs)
        for scale in (0.75, 0.85, 0.9, 0.97, 1.0, 1.05):
            other_factor = torch.full_like(factor, scale).log()
            assert bool(
                (best_errors <= group_errors(weight, other_factor, quant_scheme, costs)).all()
            )
        unscaled_errors = group_errors(weight, torch.zeros_like(factor), quant_scheme, costs)
        # Powers of two leave no better scale to choose.
        if quant_scheme.num_bits < 8 and quant_scheme.scale_dtype != "float8_e8m0fnu":
            assert best_errors.sum() < 0.97 * unscaled_errors.sum()


def group_errors(
    weight: Tensor, factor: Tensor, quant_scheme: Scheme, cost: Tensor | None
) -> Tensor:
    """Return squared errors (N, G), weighted by a cost per feature."""
    errors = (round_weight(weight, quant_scheme, factor) - weight).square()
    errors = errors if cost is None else errors * cost
    return errors.view(*factor.shape, -1).sum(-1)


def test_fitted_scales_improve_logits_and_are_exported(tmp_path: Path) -> None:
    """With round-to-nearest and with GPTQ; the exported file gives the same logits."""
    plain, unseen = decoder(), tokens(4, seed=99)
    expected = model_logits(plain, unseen)

    def error(model: nn.Module) -> float:
        return float((model_logits(model, unseen) - expected).square().mean())

    fitted = qat(decoder(), "ct.int3_g32", learned_scales=True)
    fit_scales(fitted)
    assert error(fitted) < error(qat(decoder(), "ct.int3_g32"))
    batches = [tokens(8, seed=seed) for seed in range(4)]
    by_gptq, by_both = decoder(), decoder()
    gptq(by_gptq, "ct.int3_g32", batches)
    gptq(by_both, "ct.int3_g32", batches, fit_scales=True)
    assert error(by_both) < error(by_gptq)
    for name, model in (("rtn", fitted), ("gptq", by_both)):
        runtime = open_runtime(export(model, tmp_path / name), "ct")
        assert torch.equal(runtime.logits(unseen), model_logits(model, unseen))


def test_fitting_needs_learned_scales() -> None:
    """The message says how to get them."""
    with pytest.raises(LayerError, match="learned_scales=True"):
        fit_scales(qat(decoder(1), "ct.int4_g32"))


@pytest.mark.parametrize("by_loss", [False, True])
@pytest.mark.parametrize("name", ["gguf.q4_0", "ort.matmulnbits", "ct.int3_g32", "ct.w8a8"])
def test_gptq_results_are_on_the_exported_grid(name: str, by_loss: bool) -> None:
    """Rounding the layer's weight again changes nothing beyond a scale's last bit."""
    model = decoder(1)
    gptq(model, name, [tokens(4)], by_loss=by_loss)
    for _, layer in prepared_layers(model):
        assert layer.scheme is not None
        stored = quantize_weight(layer.weight, layer.scheme, layer.factor).weight()
        torch.testing.assert_close(stored, layer.weight.detach(), rtol=1e-6, atol=1e-9)


WITH_ZERO = [name for name in SINGLE_LEVEL if scheme(name).has_zero]
GPTQ_SAMPLE = {"gguf.q4_0", "ct.w8a8", "ct.w4a16_asym_g32", "ct.fp8_block", "ct.nvfp4"}
"""Schemes of the default tests: scales per group, row and block, zero points, and two levels."""


@pytest.mark.parametrize("by_loss", [False, True])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in GPTQ_SAMPLE else pytest.mark.slow) for n in WITH_ZERO],
)
def test_gptq_for_training_gives_the_same_codes_with_closer_weights(
    name: str, by_loss: bool
) -> None:
    """`for_training` changes no code and no scale, and pruned weights stay zero."""
    batches = [tokens(4)]
    plain, rounded, near = decoder(1), decoder(1), decoder(1)
    for model in (rounded, near):
        prune(model, "2:4")
    gptq(rounded, name, batches, by_loss=by_loss)
    gptq(near, name, batches, by_loss=by_loss, for_training=True)
    rounded_layers = dict(prepared_layers(rounded))
    for key, layer in prepared_layers(near):
        if layer.scheme is None:
            continue
        expected = quantize_weight(
            rounded_layers[key].weight, layer.scheme, rounded_layers[key].factor
        ).weight()
        stored = quantize_weight(layer.weight, layer.scheme, layer.factor).weight()
        torch.testing.assert_close(stored, expected, rtol=1e-6, atol=1e-9)
        original = plain.get_parameter(f"{key}.weight") * layer.mask
        change, rounded_change = (
            (layer.weight - original).abs().mean(),
            (rounded_layers[key].weight - original).abs().mean(),
        )
        assert change < 0.6 * rounded_change
        assert not bool(layer.weight[~layer.mask].any())


@pytest.mark.parametrize("build", [decoder, llama])
def test_gptq_logits_are_closer_than_rounding(build: type[nn.Module]) -> None:
    """Three bits, on tokens that were not used for calibration."""
    plain, rounded, calibrated = build(), build(), build()
    qat(rounded, "ct.int3_g32")
    gptq(calibrated, "ct.int3_g32", [tokens(8, seed=seed) for seed in range(4)])
    unseen = tokens(4, seed=99)
    expected = model_logits(plain, unseen)
    rtn_error = (model_logits(rounded, unseen) - expected).square().mean()
    gptq_error = (model_logits(calibrated, unseen) - expected).square().mean()
    assert gptq_error < 0.9 * rtn_error


@pytest.mark.parametrize("build", [decoder, llama])
def test_rounding_by_loss_has_a_smaller_divergence(build: type[nn.Module]) -> None:
    """Compared with GPTQ, measured as divergence from the plain model on unseen tokens."""
    unseen = tokens(8, seed=99)
    expected = model_logits(build(), unseen)

    def divergence(**options: bool) -> float:
        model = build()
        gptq(model, "ct.int3_g32", [tokens(8, seed=seed) for seed in range(16)], **options)
        return float(distillation_loss(model_logits(model, unseen), expected))

    assert divergence(by_loss=True) < 0.95 * min(divergence(), divergence(act_order=True))


def test_rounding_by_loss_names_the_layer_before_nonfinite_logits() -> None:
    """No layer's input is NaN here, but the logits are; requires_grad flags are restored."""
    model = decoder(1)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = float("nan")
    with pytest.raises(
        CalibrationError, match=r"logits .* weights after model\.layers\.0\.self_attn\.q_proj"
    ):
        gptq(model, "ct.int4_g32", [tokens(2)], by_loss=True)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_calibration_names_the_layer_that_meets_nan() -> None:
    """A bad weight is detected where its output first becomes an input."""
    model = decoder(2)
    with torch.no_grad():
        model.get_parameter("model.layers.1.post_attention_layernorm.weight")[3] = float("nan")
    with pytest.raises(CalibrationError, match=r"model\.layers\.1\.mlp\.gate_proj: 96 of"):
        gptq(model, "ct.int4_g32", [tokens(2)])
    with pytest.raises(CalibrationError, match="calibration needs tokens"):
        wanda(decoder(), "2:4", [])


def kept_per_four(mask: Tensor) -> Tensor:
    """Return the number of kept weights in every four neighbors."""
    return mask.view(-1, 4).sum(1)


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_2_4_keeps_two_of_every_four(method: str) -> None:
    """In every layer but the head, and in the stored weights too."""
    model = decoder()
    if method == "wanda":
        wanda(model, "2:4", [tokens(4)])
    else:
        prune(model, "2:4")
    kept_masks = masks(model)
    assert len(kept_masks) == 2 * 7
    for name, mask in kept_masks.items():
        assert bool((kept_per_four(mask) == 2).all())
        assert torch.equal(model.get_submodule(name).weight != 0, mask)


def test_wanda_keeps_weights_of_large_inputs() -> None:
    """A feature with a norm a million times larger loses none of its weights."""
    model = decoder(1)
    with torch.no_grad():
        model.get_parameter("model.layers.0.input_layernorm.weight")[5] = 1e6
    wanda(model, 0.5, [tokens(4)])
    mask = masks(model)["model.layers.0.self_attn.q_proj"]
    assert bool(mask[:, 5].all())
    assert bool((mask.sum(1) == 64).all())


def test_masks_survive_training_quantization_and_export(tmp_path: Path) -> None:
    """Earlier momentum, weight decay and learned scales do not bring pruned weights back."""
    model = decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    text = tokens(4, 33)

    def step() -> None:
        logits = model(text[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(logits, text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    prune(model, NOfM(2, 4))
    qat(model, "ct.int4_g32", learned_scales=True)
    saved_masks = {name: mask.clone() for name, mask in masks(model).items()}
    for _ in range(3):
        step()
    for name, layer in prepared_layers(model):
        assert torch.equal(
            layer.effective_weight()[~saved_masks[name]],
            torch.zeros(int((~saved_masks[name]).sum())),
        )
    folder = export(model, tmp_path / "out", verify=True)
    runtime = open_runtime(folder, "ct")
    runtime.logits(tokens())  # the first forward pass unpacks the codes
    runtime_modules = dict(runtime.model.named_modules())  # type: ignore[attr-defined]
    for name, mask in saved_masks.items():
        assert not bool(runtime_modules[name].weight[~mask].any())
    keep_zeros(model)
    assert sparsity(model) == 0.5


def test_gradual_pruning_is_cubic_and_monotonic() -> None:
    """A cubic from 0 to the pattern's sparsity; a pruned weight stays pruned."""
    model = decoder(1)
    schedule = GradualPruning(pattern=0.8, begin=2, end=12, every=5)
    sparsities, last_masks = [], None
    for step in range(15):
        changed = schedule.apply(model, step)
        assert changed == (step in (2, 7, 12))
        if changed:
            current = masks(model)
            if last_masks is not None:
                assert all(not bool((current[n] & ~last_masks[n]).any()) for n in current)
            last_masks = {name: mask.clone() for name, mask in current.items()}
            sparsities.append(round(sparsity(model), 3))
    assert sparsities == [0.0, 0.7, 0.8]  # 0.8 · (1 - ½³) = 0.7


@pytest.mark.parametrize("pattern", ["2:4", 0.8])
def test_gradual_pruning_never_restores_weights_moved_by_momentum(pattern: str | float) -> None:
    """Momentum changes stored masked weights, which must not raise their score."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    schedule, last_mask, moved = GradualPruning(pattern=pattern, end=60, every=5), None, 0
    for step in range(61):
        if last_mask is not None:
            moved += int(model[0].weight[~last_mask].count_nonzero())
        if schedule.apply(model, step):
            mask = masks(model)["0"].clone()
            assert last_mask is None or not bool((mask & ~last_mask).any())
            last_mask = mask
        inputs = torch.randn(16, 64)
        (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert moved > 1000
    assert sparsity(model) == pytest.approx(schedule.pattern.sparsity, abs=1e-3)


def test_incomplete_scores_mask_nothing() -> None:
    """Layers before the missing one stay dense too."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    with pytest.raises(LayerError, match=r"1: scores must have the shape \(32, 64\)"):
        prune(model, 0.5, scores={"0": torch.rand(64, 64)})
    assert masks(model) == {}


def test_masks_are_restored_from_zeros() -> None:
    """A model that was saved and loaded needs only its weights."""
    model = decoder()
    prune(model, 0.6)
    reloaded = decoder(seed=1)
    reloaded.load_state_dict(model.state_dict())
    mask_zeros(reloaded)
    assert all(torch.equal(mask, masks(model)[name]) for name, mask in masks(reloaded).items())


def test_impossible_patterns_are_refused() -> None:
    """The message names a fix, and nothing is masked before."""
    layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(6, 4))
    with pytest.raises(
        LayerError, match="1: 2:4 needs rows whose length is a multiple of 4, got 6"
    ):
        prune(layers, "2:4")
    assert masks(layers) == {}
    for pattern in ("4:2", "half", 1.5):
        with pytest.raises(ConfigError):
            prune(layers, pattern)
    with pytest.raises(ConfigError, match="'down' matches no layer"):
        prune(layers, 0.5, ignore=["down"])
