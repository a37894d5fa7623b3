"""Rounding and pruning after training: what calibration buys, and what it refuses."""

from pathlib import Path

import pytest
import torch
from models import decoder, llama, tokens
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
from ms_compress.targets.rules import NAMES, scheme
from ms_compress.targets.target import open_runtime
from ms_compress.training.distillation import distillation_loss


@pytest.mark.parametrize("name", NAMES)
def test_gptq_loses_less_of_the_output_than_rounding(name: str) -> None:
    """On inputs whose features hang together, the error of X Wᵀ is smaller than RTN's."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16) @ torch.randn(16, 128) + 0.1 * torch.randn(512, 128)
    weight, how = torch.randn(64, 128), scheme(name)
    found, scales = gptq_weight("layer", weight, inputs.t() @ inputs, how)
    assert scales.shape == (64, 128 // how.group_of(128))
    theirs = (inputs @ (weight - found).t()).square().mean()
    plain = (inputs @ (weight - round_weight(weight, how)).t()).square().mean()
    assert theirs < 0.7 * plain


@pytest.mark.parametrize("name", NAMES)
def test_fitted_scales_err_least_of_all_that_are_tried(name: str) -> None:
    """Group by group: never more than the scheme's own, and in few bits less."""
    torch.manual_seed(0)
    weight, how = torch.randn(24, 64), scheme(name)
    cost = torch.rand(64)
    for costs in (None, cost):
        factor = best_factor(weight, how, costs)
        assert factor.shape == (24, 64 // how.group_of(64))
        best = group_errors(weight, factor, how, costs)
        for fit in (0.75, 0.85, 0.9, 0.97, 1.0, 1.05):
            other = torch.full_like(factor, fit).log()
            assert bool((best <= group_errors(weight, other, how, costs)).all())
        own = group_errors(weight, torch.zeros_like(factor), how, costs)
        if how.bits < 8:
            assert best.sum() < 0.97 * own.sum()


def group_errors(weight: Tensor, factor: Tensor, how: Scheme, cost: Tensor | None) -> Tensor:
    """Squared errors at a cost of each feature, (N, G)."""
    errors = (round_weight(weight, how, factor) - weight).square()
    errors = errors if cost is None else errors * cost
    return errors.view(*factor.shape, -1).sum(-1)


def test_fitted_scales_bring_logits_nearer_and_are_what_is_exported(tmp_path: Path) -> None:
    """In rounding to nearest and in GPTQ; the reloaded file gives the same logits."""
    plain, unseen = decoder(), tokens(4, seed=99)
    truth = model_logits(plain, unseen)

    def error(model: nn.Module) -> float:
        return float((model_logits(model, unseen) - truth).square().mean())

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


def test_a_model_without_learned_scales_has_none_to_fit() -> None:
    """The message says how to get them."""
    with pytest.raises(LayerError, match="learned_scales=True"):
        fit_scales(qat(decoder(1), "ct.int4_g32"))


@pytest.mark.parametrize("by_loss", [False, True])
@pytest.mark.parametrize("name", ["gguf.q4_0", "ort.matmulnbits", "ct.int3_g32", "ct.w8a8"])
def test_what_gptq_has_rounded_is_on_the_grid_that_is_exported(name: str, by_loss: bool) -> None:
    """Rounding the layer's weight again changes nothing beyond a scale's last bit."""
    model = decoder(1)
    gptq(model, name, [tokens(4)], by_loss=by_loss)
    for _, layer in prepared_layers(model):
        assert layer.scheme is not None
        stored = quantize_weight(layer.weight, layer.scheme, layer.factor).weight()
        torch.testing.assert_close(stored, layer.weight.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("by_loss", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_weights_left_near_what_they_were_are_rounded_as_gptq_has_it(
    name: str, by_loss: bool
) -> None:
    """`for_training` changes no code and no scale, and what was pruned stays zero."""
    batches = [tokens(4)]
    plain, rounded, near = decoder(1), decoder(1), decoder(1)
    for model in (rounded, near):
        prune(model, "2:4")
    gptq(rounded, name, batches, by_loss=by_loss)
    gptq(near, name, batches, by_loss=by_loss, for_training=True)
    theirs = dict(prepared_layers(rounded))
    for key, layer in prepared_layers(near):
        if layer.scheme is None:
            continue
        expected = quantize_weight(theirs[key].weight, layer.scheme, theirs[key].factor).weight()
        stored = quantize_weight(layer.weight, layer.scheme, layer.factor).weight()
        torch.testing.assert_close(stored, expected, rtol=1e-6, atol=1e-9)
        was = plain.get_parameter(f"{key}.weight") * layer.mask
        moved, snapped = (layer.weight - was).abs().mean(), (theirs[key].weight - was).abs().mean()
        assert moved < 0.6 * snapped
        assert not bool(layer.weight[~layer.mask].any())


@pytest.mark.parametrize("build", [decoder, llama])
def test_gptq_brings_logits_nearer_than_rounding(build: type[nn.Module]) -> None:
    """Three bits, on tokens that were not used for calibration."""
    plain, rounded, better = build(), build(), build()
    qat(rounded, "ct.int3_g32")
    gptq(better, "ct.int3_g32", [tokens(8, seed=seed) for seed in range(4)])
    unseen = tokens(4, seed=99)
    truth = model_logits(plain, unseen)
    of_rounding = (model_logits(rounded, unseen) - truth).square().mean()
    of_gptq = (model_logits(better, unseen) - truth).square().mean()
    assert of_gptq < 0.9 * of_rounding


@pytest.mark.parametrize("build", [decoder, llama])
def test_counted_by_the_loss_rounding_leaves_predictions_nearer(build: type[nn.Module]) -> None:
    """Divergence from the plain model is less than GPTQ's, on tokens that it did not see."""
    unseen = tokens(8, seed=99)
    truth = model_logits(build(), unseen)

    def apart(**how: bool) -> float:
        model = build()
        gptq(model, "ct.int3_g32", [tokens(8, seed=seed) for seed in range(16)], **how)
        return float(distillation_loss(model_logits(model, unseen), truth))

    assert apart(by_loss=True) < 0.95 * min(apart(), apart(act_order=True))


def test_rounding_by_loss_says_after_which_layer_a_model_has_gone_bad() -> None:
    """No layer's input is NaN here, but logits are; parameters take gradients as before."""
    model = decoder(1)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = float("nan")
    with pytest.raises(
        CalibrationError, match=r"logits .* weights after model\.layers\.0\.self_attn\.q_proj"
    ):
        gptq(model, "ct.int4_g32", [tokens(2)], by_loss=True)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_calibration_names_the_layer_that_meets_nan() -> None:
    """A weight gone bad shows where its output is first an input."""
    model = decoder(2)
    with torch.no_grad():
        model.get_parameter("model.layers.1.post_attention_layernorm.weight")[3] = float("nan")
    with pytest.raises(CalibrationError, match=r"model\.layers\.1\.mlp\.gate_proj: 96 of"):
        gptq(model, "ct.int4_g32", [tokens(2)])
    with pytest.raises(CalibrationError, match="calibration needs tokens"):
        wanda(decoder(), "2:4", [])


def groups_of_four(mask: Tensor) -> Tensor:
    """How many of each four neighbors stay."""
    return mask.view(-1, 4).sum(1)


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_two_of_four_is_two_of_every_four(method: str) -> None:
    """In each layer but the head, and in the stored weights too."""
    model = decoder()
    if method == "wanda":
        wanda(model, "2:4", [tokens(4)])
    else:
        prune(model, "2:4")
    kept = masks(model)
    assert len(kept) == 2 * 7
    for name, mask in kept.items():
        assert bool((groups_of_four(mask) == 2).all())
        assert torch.equal(model.get_submodule(name).weight != 0, mask)


def test_wanda_keeps_weights_that_meet_large_inputs() -> None:
    """A feature whose norm is a million times as large loses none of its weights."""
    model = decoder(1)
    with torch.no_grad():
        model.get_parameter("model.layers.0.input_layernorm.weight")[5] = 1e6
    wanda(model, 0.5, [tokens(4)])
    mask = masks(model)["model.layers.0.self_attn.q_proj"]
    assert bool(mask[:, 5].all())
    assert bool((mask.sum(1) == 64).all())


def test_masks_hold_through_training_quantization_and_export(tmp_path: Path) -> None:
    """Momentum from before, weight decay and learned scales bring no pruned weight back."""
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
    before = {name: mask.clone() for name, mask in masks(model).items()}
    for _ in range(3):
        step()
    for name, layer in prepared_layers(model):
        assert torch.equal(
            layer.effective_weight()[~before[name]], torch.zeros(int((~before[name]).sum()))
        )
    folder = export(model, tmp_path / "out", verify=True)
    runtime = open_runtime(folder, "ct")
    runtime.logits(tokens())  # codes become weights at the first forward
    there = dict(runtime.model.named_modules())  # type: ignore[attr-defined]
    for name, mask in before.items():
        assert not bool(there[name].weight[~mask].any())
    keep_zeros(model)
    assert sparsity(model) == 0.5


def test_gradual_pruning_rises_and_never_returns() -> None:
    """The cubic from 0 to the pattern's share; a weight once pruned stays so."""
    model = decoder(1)
    schedule = GradualPruning(pattern=0.8, begin=2, end=12, every=5)
    shares, last = [], None
    for step in range(15):
        changed = schedule.apply(model, step)
        assert changed == (step in (2, 7, 12))
        if changed:
            now = masks(model)
            if last is not None:
                assert all(not bool((now[n] & ~last[n]).any()) for n in now)
            last = {name: mask.clone() for name, mask in now.items()}
            shares.append(round(sparsity(model), 3))
    assert shares == [0.0, 0.7, 0.8]  # 0.8 · (1 - ½³) = 0.7


@pytest.mark.parametrize("how", ["2:4", 0.8])
def test_gradual_pruning_takes_nothing_back_that_an_optimizer_has_moved(how: str | float) -> None:
    """Momentum moves stored weights that are masked; they are not larger for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    schedule, last, moved = GradualPruning(pattern=how, end=60, every=5), None, 0
    for step in range(61):
        if last is not None:
            moved += int(model[0].weight[~last].count_nonzero())
        if schedule.apply(model, step):
            now = masks(model)["0"].clone()
            assert last is None or not bool((now & ~last).any())
            last = now
        inputs = torch.randn(16, 64)
        (model(inputs) - inputs.roll(1, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert moved > 1000
    assert sparsity(model) == pytest.approx(schedule.pattern.sparsity, abs=1e-3)


def test_scores_that_lack_a_layer_mask_nothing() -> None:
    """The layers before it stay dense too."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    with pytest.raises(LayerError, match=r"1: scores must have the shape \(32, 64\)"):
        prune(model, 0.5, scores={"0": torch.rand(64, 64)})
    assert masks(model) == {}


def test_masks_are_found_again_in_zeros() -> None:
    """A model that was saved and read needs nothing but its weights."""
    model = decoder()
    prune(model, 0.6)
    again = decoder(seed=1)
    again.load_state_dict(model.state_dict())
    mask_zeros(again)
    assert all(torch.equal(mask, masks(model)[name]) for name, mask in masks(again).items())


def test_patterns_refuse_what_they_cannot_do() -> None:
    """With what fits, and before anything is masked."""
    layers = nn.Sequential(nn.Linear(8, 4), nn.Linear(6, 4))
    with pytest.raises(
        LayerError, match="1: 2:4 needs rows whose length is a multiple of 4, got 6"
    ):
        prune(layers, "2:4")
    assert masks(layers) == {}
    for wrong in ("4:2", "half", 1.5):
        with pytest.raises(ConfigError):
            prune(layers, wrong)
    with pytest.raises(ConfigError, match="'down' matches no layer"):
        prune(layers, 0.5, ignore=["down"])
