"""K-quants and the other 4-bit types of GGUF, against the gguf library's dequantizer."""

from pathlib import Path

import gguf
import pytest
import torch
from models import VOCABULARY, enlarge, tokens
from torch import Tensor, nn

from ms_compress import LayerError, export, gptq, qat
from ms_compress.deployment.verification import check_weights
from ms_compress.methods.awq import awq, smoothquant
from ms_compress.methods.importance import input_importance
from ms_compress.methods.pruning import prune
from ms_compress.methods.qat import fit_scales
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import prepared_layers
from ms_compress.quantization.rounding import (
    best_factor,
    quantize_weight,
    round_activations,
    round_weight,
    scale_gradient,
)
from ms_compress.quantization.scheme import Scheme
from ms_compress.targets.gguf.blocks import pack
from ms_compress.targets.gguf.rules import Q8_K_BLOCKS
from ms_compress.targets.rules import scheme
from ms_parallel.models import Decoder, DecoderConfig
from ms_parallel.weights import initialize

NAMES = ["q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "mxfp4"]
K_QUANTS = [name for name in NAMES if name.endswith("_k")]


def extreme_weights() -> Tensor:
    """Return rows of every kind: zeros, one sign, ties, one value, tiny and large magnitudes."""
    torch.manual_seed(0)
    weight = torch.randn(24, 512) * 0.02
    weight[1] = 0
    weight[2, :256] = 0
    weight[3], weight[4] = weight[3].abs(), -weight[4].abs()
    weight[5], weight[6] = 0.01, -0.01
    weight[7] *= 1e-6
    weight[8] *= 1e6
    weight[9, ::7] *= 30
    weight[10] = torch.randint(-8, 8, (512,)) * 0.5
    weight[11, 5], weight[11, 6] = 1.0, -1.0
    weight[12, :] = 0
    weight[12, 300] = 3.0
    weight[13] = weight[13].clamp(min=1e-9)
    weight[14, :32], weight[14, 32:] = 1e-8, 1.0
    return weight


def decoder() -> Decoder:
    """A decoder whose rows are multiples of 256."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
    )
    model = Decoder(config)
    initialize(model, 0)
    enlarge(model)
    return model


def dequantized(weight: Tensor, quant_scheme: Scheme, factor: Tensor | None) -> Tensor:
    """Return a weight as the library reads it from packed blocks."""
    quant_type = gguf.GGMLQuantizationType[str(quant_scheme.format)]
    blocks = pack(quantize_weight(weight, quant_scheme, factor))
    return torch.from_numpy(gguf.dequantize(blocks, quant_type).copy())


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_blocks_dequantize_to_the_values_of_training(name: str, fitted: bool) -> None:
    """Bit for bit, with the scheme's own scales and with searched scales."""
    weight, quant_scheme = extreme_weights(), scheme(f"gguf.{name}")
    factor = best_factor(weight, quant_scheme) if fitted else None
    trained = round_weight(weight, quant_scheme, factor)
    assert bool(trained.isfinite().all())
    assert torch.equal(dequantized(weight, quant_scheme, factor), trained)


@pytest.mark.parametrize("name", K_QUANTS)
def test_every_packed_integer_is_read_back(name: str) -> None:
    """Random codes, scales and minimums over their whole ranges."""
    quant_scheme = scheme(f"gguf.{name}")
    rule = quant_scheme.super_block
    assert rule is not None
    torch.manual_seed(0)
    value = quantize_weight(torch.randn(64, 512), quant_scheme)
    value.codes.copy_(torch.randint(quant_scheme.low, quant_scheme.high + 1, value.codes.shape))
    value.scales.copy_(torch.randint(rule.low, rule.high + 1, value.scales.shape))
    if value.zeros is not None:
        value.zeros.copy_(torch.randint(0, rule.high + 1, value.zeros.shape))
    quant_type = gguf.GGMLQuantizationType[str(quant_scheme.format)]
    read = torch.from_numpy(gguf.dequantize(pack(value), quant_type).copy())
    assert torch.equal(read, value.weight())


@pytest.mark.parametrize("name", K_QUANTS)
def test_the_search_lowers_the_weighted_error(name: str) -> None:
    """The error is below the plain rule's in every row, with and without importance."""
    torch.manual_seed(0)
    weight, quant_scheme = torch.randn(64, 512), scheme(f"gguf.{name}")
    importance = torch.randn(512).square()
    for costs in (None, importance):
        weights = torch.ones(512) if costs is None else costs
        factor = best_factor(weight, quant_scheme, costs)
        fitted = (round_weight(weight, quant_scheme, factor) - weight).square() @ weights
        plain = (round_weight(weight, quant_scheme) - weight).square() @ weights
        assert bool((fitted < plain).all())


def test_inputs_of_k_quants_are_rounded_in_blocks_of_256() -> None:
    """As ggml's quantize_row_q8_K: codes rint(x * (127 / max)), scale 1 / (127 / max)."""
    torch.manual_seed(0)
    x = torch.randn(16, 512) * torch.randn(16, 1).exp()
    x[3], x[4, :256], x[5] = 0, 0, torch.randint(-8, 8, (512,)) * 0.5
    blocks = x.view(16, 2, 256)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # 127 / tensor would be a product
    expected = (blocks * inverse).round() * (1 / inverse)
    expected[largest.squeeze(-1) == 0] = 0
    assert torch.equal(round_activations(x, Q8_K_BLOCKS), expected.view(16, 512))


def test_gradients_of_scales_and_minimums_are_derivatives() -> None:
    """With codes held inside the range and clipped outside it (LSQ, equation 3)."""
    torch.manual_seed(0)
    weight, quant_scheme = torch.randn(4, 256), scheme("gguf.q4_k")
    factor = 0.05 * torch.randn(quant_scheme.factor_shape(4, 256))
    factor[:, ::2] -= 0.3  # clips weights on both sides
    gradient = torch.randn(4, 256)
    grad_weight, grad_factor = scale_gradient(weight, gradient, quant_scheme, factor)

    stored, groups = quantize_weight(weight, quant_scheme, factor), weight.view(4, 8, 32).double()
    assert stored.super_scales is not None
    assert stored.zeros is not None
    units = stored.super_scales.double().view(4, 1, 2)
    codes = stored.codes.view(4, 8, 32).double()
    extent = groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)
    shift = torch.zeros(4, 8, 2, dtype=torch.float64, requires_grad=True)
    scales = (units[..., 0] * stored.scales.double() * shift[..., 0].exp())[..., None]
    minimums = (units[..., 1] * stored.zeros.double() + shift[..., 1] * extent)[..., None]
    ratio = (groups + minimums) / scales
    inside = (ratio >= -0.5) & (ratio <= 15.5)
    # Rounding is the identity inside the range, as its residual is constant.
    rounded = torch.where(inside, ratio + (codes - ratio).detach(), codes)
    values = (rounded * scales - minimums).view(4, 256)
    (expected,) = torch.autograd.grad((values * gradient).sum(), shift)
    torch.testing.assert_close(grad_factor.double(), expected.flatten(1), rtol=1e-4, atol=1e-5)
    assert 0.05 < float((~inside).double().mean()) < 0.5
    assert torch.equal(grad_weight != 0, inside.view(4, 256))


@pytest.mark.parametrize("name", ["q4_k", pytest.param("q6_k", marks=pytest.mark.slow)])
def test_trained_folder_has_the_values_of_training(name: str, tmp_path: Path) -> None:
    """After steps that move weights, scales and minimums, read by the gguf library."""
    model = qat(decoder(), f"gguf.{name}", learned_scales=True)
    fit_scales(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(2):
        text = tokens(2, 32, seed=seed)
        logits = model(text)[:, :-1].flatten(0, 1)
        nn.functional.cross_entropy(logits, text[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = export(model, tmp_path / "out", target=f"gguf.{name}")
    check_weights(model, folder, "gguf")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_gptq_leaves_weights_at_their_codes(name: str, tmp_path: Path) -> None:
    """The folder stores the rounded weights, whose logits are closer to the float model's."""
    model, text = decoder(), tokens(4, 48)
    float_logits = model_logits(model, text)
    nearest = qat(decoder(), f"gguf.{name}")
    gptq(model, f"gguf.{name}", [tokens(8, 64, seed=seed) for seed in range(4)])
    for _, layer in prepared_layers(model):
        largest = layer.weight.abs().max()
        assert (
            float((layer.weight - layer.effective_weight()).detach().abs().max()) < 0.05 * largest
        )
    errors = [(model_logits(item, text) - float_logits).std() for item in (model, nearest)]
    assert errors[0] < errors[1]
    check_weights(model, export(model, tmp_path / "out"), "gguf")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q3_k", "q4_k"])
def test_inductor_rounds_bit_for_bit(name: str) -> None:
    """Also scales below float16's normal range: inductor elides no cast."""
    quant_scheme = scheme(f"gguf.{name}")
    assert quant_scheme.activations is not None
    rule = quant_scheme.activations

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        return round_weight(x, quant_scheme), round_activations(x, rule)

    torch.compiler.reset()
    weight = extreme_weights()
    x = torch.cat([weight, weight * 1e-5])
    for compiled, eager in zip(torch.compile(rounded, fullgraph=True)(x), rounded(x), strict=True):
        assert torch.equal(compiled, eager)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_awq_and_smoothquant_lower_the_error_of_k_quants(name: str, tmp_path: Path) -> None:
    """Both methods fit scales after moving features, and the folder has the model's values."""
    text = tokens(4, 48)
    for method in (awq, smoothquant):
        model, nearest = decoder(), qat(decoder(), f"gguf.{name}")
        float_logits = model_logits(model, text)
        method(model, f"gguf.{name}", [tokens(8, 64, seed=seed) for seed in range(2)])
        errors = [(model_logits(item, text) - float_logits).std() for item in (model, nearest)]
        assert errors[0] < errors[1]
        check_weights(model, export(model, tmp_path / method.__name__), "gguf")


def test_importance_is_the_mean_square_of_each_input() -> None:
    """The first layer's input is the normalized embedding."""
    model, text = decoder(), tokens(4, 48)
    importance = input_importance(model, [text[:2], text[2:]])
    normalized = model.model.layers["0"].input_layernorm(model.model.embed_tokens(text))
    expected = normalized.detach().square().flatten(0, 1).mean(0)
    name = "model.layers.0.self_attn.q_proj"
    torch.testing.assert_close(importance[name], expected, rtol=1e-5, atol=1e-7)
    assert len(importance) == 14


def test_mixture_stores_values_and_down_projections_with_more_bits() -> None:
    """Q4_K_M of two layers: both layers' values and down projections, and the output matrix."""
    model = qat(decoder(), "gguf.q4_k_m", head=True)
    larger = {name for name, layer in prepared_layers(model) if str(layer.scheme) == "gguf.q6_k"}
    assert larger == {
        "lm_head",
        *(f"model.layers.1.{name}" for name in ("self_attn.v_proj", "mlp.down_proj")),
    }


def test_rows_that_blocks_do_not_divide_fall_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They become Q8_0, as a warning says, and the file is read like the model."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    model = Decoder(config)
    initialize(model, 0)
    qat(model, "gguf.q4_k")
    schemes = {name.rpartition(".")[2]: str(layer.scheme) for name, layer in prepared_layers(model)}
    assert schemes["down_proj"] == "gguf.q4_k"
    assert schemes["q_proj"] == "gguf.q8_0"
    assert "6 of 7 layers" in caplog.text
    check_weights(model, export(model, tmp_path / "out", target="gguf.q4_k"), "gguf")


def test_pruned_weights_need_a_scheme_with_zero() -> None:
    """Groups with minimums cannot store zeros exactly, so they are refused."""
    model = decoder()
    prune(model, 0.5)
    with pytest.raises(LayerError, match=r"must store zero exactly, got gguf.q4_k"):
        qat(model, "gguf.q4_k")
