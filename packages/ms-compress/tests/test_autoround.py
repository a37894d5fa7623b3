"""AutoRound: its gradients, and that the learned rounding is exported."""

from pathlib import Path

import pytest
import torch
from models import SINGLE_LEVEL, decoder, llama, tokens
from test_experts import qwen3_moe
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress import (
    CalibrationError,
    ConfigError,
    autoround,
    calibrate_inputs,
    export,
    masks,
    open_runtime,
    prune,
    qat,
    separate_experts,
)
from ms_compress.methods.autoround import LearnedRounding
from ms_compress.methods.calibration import float_layers
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import Prepared, prepare_layer, prepared_layers
from ms_compress.targets.rules import scheme

BATCHES = [tokens(4, 32, seed=seed) for seed in range(2)]


def prepared(name: str, rows: int = 8, features: int = 64) -> Prepared:
    """A layer whose weights have a different range in each group."""
    torch.manual_seed(0)
    layer = nn.Linear(features, rows, bias=False)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(rows, features // 32, 1).expand(-1, -1, 32).flatten(1) + 0.1)
    return prepare_layer(layer, "layer", scheme(name), learned_scales=True)


class Rounded(torch.autograd.Function):
    """Rounding to nearest with the gradient of the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        """Round."""
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        """Pass the gradient through."""
        return gradient


def plain_autoround(
    weight: Tensor, offsets: Tensor, low: Tensor, high: Tensor, group: int, bits: int
) -> Tensor:
    """The paper's equations 1 to 3 with zero points, for autograd."""
    cells, moves = (value.view(len(weight), -1, group) for value in (weight, offsets))
    smallest = cells.amin(-1, keepdim=True).clamp(max=0) * low.unsqueeze(-1)
    largest = cells.amax(-1, keepdim=True).clamp(min=0) * high.unsqueeze(-1)
    end = 2**bits - 1
    scale = (largest - smallest) / end
    zero = Rounded.apply(-smallest / scale)
    code = (Rounded.apply(cells / scale + moves) + zero).clamp(0, end)
    return (scale * (code - zero)).view_as(weight)


def test_steps_have_the_signs_of_the_gradients_of_autograd() -> None:
    """Offsets and both clipping factors, with clipped weights on both sides."""
    layer = prepared("ct.w4a16_asym_g32")
    learned = LearnedRounding(layer, fit_scales=False)
    generator = torch.Generator().manual_seed(1)
    learned.offsets.copy_(torch.rand(learned.offsets.shape, generator=generator) - 0.5)
    for clip in learned.clips:
        clip.copy_(0.7 + 0.2 * torch.rand(clip.shape, generator=generator))
    offsets = learned.offsets.clone().requires_grad_()
    low, high = (clip.clone().requires_grad_() for clip in learned.clips)
    expected = plain_autoround(learned.weight, offsets, low, high, 32, 4)
    rounded = learned.install()
    torch.testing.assert_close(rounded, expected, rtol=1e-5, atol=1e-7)
    target = torch.randn(rounded.shape, generator=generator)
    (gradient,) = torch.autograd.grad((rounded - target).square().sum(), rounded)
    gradients = torch.autograd.grad((expected - target).square().sum(), (offsets, low, high))
    before = learned.parameters()
    rate = 2.0**-10
    learned.update(gradient, rate)
    # Clipping both ends by 10 to 30% clips some weights of most groups.
    assert 20 < int((gradients[0] == 0).sum()) < offsets.numel() / 2
    for old, new, grad in zip(before, learned.parameters(), gradients, strict=True):
        # The gradient of a clipping factor is a sum of 32 terms, whose sign is uncertain near 0.
        certain = (grad == 0) | (grad.abs() > 1e-5 * grad.abs().max())
        assert int(certain.sum()) > 0.9 * grad.numel()
        steps = ((old - new) / rate).round()
        assert torch.equal(steps[certain], grad.sign()[certain])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("ct.nvfp4", "gguf.iq4_nl") else pytest.mark.slow)
        for name in (*SINGLE_LEVEL, "gguf.q4_k", "gguf.q3_k")
    ],
)
def test_a_layer_stores_what_was_learned(name: str) -> None:
    """The scheme's rule, applied to the stored weight and factor, gives the learned weight."""
    layer = prepared(name, rows=32, features=256)
    learned = LearnedRounding(layer, fit_scales=False)
    generator = torch.Generator().manual_seed(0)
    for step in range(20):
        learned.install()
        learned.update(torch.randn(32, 256, generator=generator), 0.05 * (1 - step / 20))
    expected = learned.install().detach()
    original = learned.original.detach().clone()
    learned.finish()
    assert float((expected - original).abs().max()) > 0
    # A float32 scale is stored as the exponential of its logarithm: some units in the last place.
    # Scales of super-blocks are integers, which rounding may change by one of at most 63.
    tolerance = 0.1 if name.endswith("_k") else 1e-5
    difference = (layer.effective_weight() - expected).detach().abs().max()
    assert float(difference / expected.abs().max()) < tolerance


def test_learned_rounding_lowers_the_error_of_a_decoder_layer() -> None:
    """Compared with rounding to nearest on the calibration tokens, with 4-bit inputs too."""
    for name in ("ct.int4_g32", "ct.mxfp4"):
        outputs, text = {}, torch.cat(BATCHES)
        for method in ("float", "rtn", "autoround"):
            model = decoder(1)
            if method == "autoround":
                autoround(model, name, BATCHES, iters=30)
            else:
                qat(model, name)
            outputs[method] = last_hidden(model, text, in_float=method == "float")
        errors = {m: F.mse_loss(outputs[m], outputs["float"]) for m in ("rtn", "autoround")}
        assert errors["autoround"] < 0.9 * errors["rtn"]


def last_hidden(model: nn.Module, text: Tensor, *, in_float: bool) -> Tensor:
    """The output of the first decoder layer."""
    captured: list[Tensor] = []
    block = model.get_submodule("model.layers.0")
    with block.register_forward_hook(lambda module, args, out: captured.append(out)):
        if in_float:
            with float_layers(model):
                model_logits(model, text)
        else:
            model_logits(model, text)
    return captured[0]


@pytest.mark.parametrize(
    "name", ["ct.nvfp4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ct.w8a8", "ct.fp8"))]
)
def test_exported_folders_compute_what_was_learned(name: str, tmp_path: Path) -> None:
    """Transformers gives the same logits, bit for bit."""
    model = llama()
    autoround(model, name, BATCHES, iters=4)
    runtime = open_runtime(export(model, tmp_path / "out"), "ct")
    assert torch.equal(runtime.logits(tokens()), model_logits(model, tokens()))


def test_pruned_weights_stay_zero() -> None:
    """Learned offsets do not move them."""
    model = decoder(1)
    prune(model, 0.5)
    expected = masks(model)
    autoround(model, "ct.int4_g32", BATCHES, iters=4)
    for name, layer in prepared_layers(model):
        assert not bool(layer.effective_weight()[~expected[name]].any())
    assert len(expected) == 7


def test_experts_without_tokens_are_rounded_to_nearest() -> None:
    """Four tokens reach at most eight of sixteen experts; none is left in float."""
    model = separate_experts(qwen3_moe())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    autoround(model, "ct.int4_g32", [tokens(1, 2)], iters=8)
    nearest = separate_experts(qwen3_moe())
    qat(nearest, "ct.int4_g32")
    moved = [
        name
        for name, layer in prepared_layers(model)
        if ".experts." in name
        and not torch.allclose(
            layer.effective_weight(),
            nearest.get_submodule(name).effective_weight(),  # type: ignore[operator]
            atol=1e-5,
        )
    ]
    assert 0 < len(moved) <= 24
    assert all(layer.scheme is not None for _, layer in prepared_layers(model))
    assert torch.equal(model.state_dict()["lm_head.weight"], before["lm_head.weight"])


def test_calibrated_inputs_are_kept() -> None:
    """As in rounding to nearest: learned weights do not change the input scales."""
    model, nearest = decoder(1), qat(decoder(1), "ct.fp8")
    autoround(model, "ct.fp8", BATCHES, iters=2)
    calibrate_inputs(nearest, BATCHES)
    peaks = [
        {name: float(layer.input_peak) for name, layer in prepared_layers(m)}  # type: ignore[arg-type]
        for m in (model, nearest)
    ]
    assert peaks[0] == peaks[1]
    assert min(peaks[0].values()) > 0


def test_bad_arguments_are_named() -> None:
    """Before the model is changed, or with the layer's name."""
    with pytest.raises(ConfigError, match="iters must be an integer of at least 1, got 0"):
        autoround(decoder(1), "ct.int4_g32", BATCHES, iters=0)
    model = decoder(2)
    with torch.no_grad():
        model.get_submodule("model.layers.1.input_layernorm").weight.fill_(torch.inf)  # type: ignore[operator,union-attr]
    with pytest.raises(CalibrationError, match=r"model\.layers\.1: its output .* is NaN"):
        autoround(model, "ct.int4_g32", BATCHES, iters=1)
