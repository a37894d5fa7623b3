"""Gradients of the fake quantizer, its schedule, and refused layers."""

from itertools import pairwise

import pytest
import torch
import transformers
from models import SINGLE_LEVEL, decoder, llama, tokens
from torch import nn

from ms_compress import FloatThenQuantized, LayerError, Tuning, prune, qat, tune
from ms_compress.quantization.layers import FACTOR, PreparedLinear
from ms_compress.quantization.rounding import quantize_weight, round_weight
from ms_compress.targets.rules import scheme


@pytest.mark.parametrize("name", SINGLE_LEVEL)
def test_gradients_pass_straight_through(name: str) -> None:
    """With the default scales they match a product with rounded weight and input."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(128, 8))
    x = torch.randn(2, 3, 128, requires_grad=True)
    weight = layer[0].weight
    qat(layer, name, activations=False)
    out = layer(x)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    rounded = round_weight(weight.detach(), scheme(name))
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(x.grad, grad_out @ rounded)
    product = grad_out.flatten(0, 1).t() @ x.detach().flatten(0, 1)
    torch.testing.assert_close(weight.grad, product)
    torch.testing.assert_close(layer[0].bias.grad, grad_out.sum((0, 1)))


@pytest.mark.parametrize("name", SINGLE_LEVEL)
def test_autocast_equals_a_linear_layer_with_the_rounded_weight(name: str) -> None:
    """Rounding in float32, products in bfloat16, gradients in the parameters' dtype."""
    torch.manual_seed(0)
    layer, plain = nn.Sequential(nn.Linear(128, 8)), nn.Linear(128, 8)
    plain.load_state_dict(layer[0].state_dict())
    with torch.no_grad():
        plain.weight.copy_(round_weight(plain.weight, scheme(name)))
    qat(layer, name, activations=False)
    x, plain_x = (torch.randn(5, 128).requires_grad_() for _ in range(2))
    plain_x.data.copy_(x.data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, expected = layer(x), plain(plain_x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    grad_out = torch.randn_like(out)
    out.backward(grad_out)
    expected.backward(grad_out)
    for actual, reference in (
        (x, plain_x),
        (layer[0].weight, plain.weight),
        (layer[0].bias, plain.bias),
    ):
        assert actual.grad is not None
        assert actual.grad.dtype == torch.float32
        torch.testing.assert_close(actual.grad, reference.grad)


def test_a_single_vector_works_as_in_a_linear_layer() -> None:
    """Inputs (K,), backward too."""
    layer = qat(nn.Sequential(nn.Linear(64, 8)), "gguf.q4_0")
    rows = torch.randn(1, 64)
    layer(rows[0]).sum().backward()
    vector_grad = layer[0].weight.grad.clone()
    layer.zero_grad()
    layer(rows).sum().backward()
    assert torch.equal(vector_grad, layer[0].weight.grad)


def test_an_input_that_was_overwritten_is_rounded_again() -> None:
    """Also under inference mode, where torch does not count versions."""
    layer = qat(nn.Sequential(nn.Linear(64, 8)), "gguf.q4_0")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            x, new = torch.randn(2, 64), torch.randn(2, 64)
            layer(x)
            x.copy_(new)
            assert torch.equal(layer(x), layer(new))


@pytest.mark.parametrize("name", ["ct.int4_g32", "ort.matmulnbits"])
def test_scales_have_lsq_gradients(name: str) -> None:
    """If codes do not change with the scale, its gradient is (codes - ratio) times the scale."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 4, bias=False))
    qat(layer, name, learned_scales=True)
    factor = layer[0].get_parameter(FACTOR)
    factor.data.fill_(-0.7)  # half the range, so many weights are clipped
    weight = layer[0].weight.detach()
    layer(torch.eye(32)).sum().backward()
    quantized = quantize_weight(weight, scheme(name), factor.detach())
    codes, scales = quantized.codes.float(), quantized.scales.float()
    ratio = weight / scales
    inside = (ratio >= -8.5) & (ratio <= 7.5)
    expected = ((codes - ratio * inside) * scales).sum(1, keepdim=True)
    torch.testing.assert_close(factor.grad, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer[0].weight.grad != 0, inside)
    assert not bool(inside.all())


def test_a_model_is_float_until_its_schedule_quantizes_it() -> None:
    """Before that it computes the same as the plain model."""
    schedule = FloatThenQuantized(float_steps=2)
    plain, prepared = decoder(), qat(decoder(), "gguf.q4_0")
    text = tokens()
    assert not schedule.apply(prepared, 1)
    torch.testing.assert_close(prepared(text), plain(text), rtol=0, atol=1e-5)
    assert schedule.apply(prepared, 2)
    assert float((prepared(text) - plain(text)).abs().max()) > 0.01


def test_layers_are_prepared_in_place_except_ignored_ones() -> None:
    """Names and parameters stay; the head and ignored layers are plain."""
    model = decoder(tied=False)
    parameters_before = dict(model.named_parameters())
    qat(model, "ct.int4_g32", ignore=["*.down_proj"])
    parameters_after = dict(model.named_parameters())
    assert all(parameters_after[name] is parameters_before[name] for name in parameters_before)
    types = {name: type(layer) for name, layer in model.named_modules()}
    assert types["model.layers.0.mlp.up_proj"] is PreparedLinear
    assert types["model.layers.0.mlp.down_proj"] is nn.Linear
    assert types["lm_head"] is nn.Linear


class CustomLinear(nn.Module):
    """A matrix in a module that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32, 32))


def test_unsupported_layers_are_named_and_nothing_is_changed() -> None:
    """The message names a fix."""
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    with pytest.raises(
        LayerError, match=r"1: ct\.int4_g32 has groups of 32 weights.*use a group of 16"
    ):
        qat(model, "ct.int4_g32")
    assert type(model[0]) is nn.Linear
    qat(model, "ct.int4_g16")  # the remedy
    blocks = nn.Sequential(nn.Linear(80, 32))
    with pytest.raises(LayerError, match="rows of 80; name the layer as an exception"):
        qat(blocks, "gguf.q4_0")  # llama.cpp has only blocks of 32
    with pytest.raises(LayerError, match="got CustomLinear; add it to the exceptions"):
        qat(nn.Sequential(nn.Linear(32, 32), CustomLinear()), "ct.int4_g32")
    with pytest.raises(LayerError, match="cannot store a quantized embedding"):
        qat(decoder(), "ct.int4_g32", embeddings=True, head=True)
    with pytest.raises(LayerError, match="set embeddings and head to the same value"):
        qat(decoder(), "gguf.q4_0", head=True)
    prepared = qat(decoder(), "gguf.q4_0")
    with pytest.raises(LayerError, match=r"already prepared for gguf\.q4_0"):
        qat(prepared, "ct.int4_g32")


def test_fused_experts_are_refused_unless_ignored() -> None:
    """Transformers stores mixtures like this; ignored layers stay in float on purpose."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        vocab_size=64,
    )
    model = transformers.MixtralForCausalLM(config)
    with pytest.raises(LayerError, match=r"mlp\.experts must be .*got MixtralExperts"):
        qat(model, "ct.int4_g32", ignore=["*.gate"])
    with pytest.raises(LayerError, match=r"mlp\.experts must be .*got MixtralExperts"):
        prune(model, "2:4", ignore=["*.gate"])
    qat(model, "ct.int4_g32", ignore=["*.gate", "*.experts"])
    parametrized = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    with pytest.raises(
        LayerError,
        match=r"0\.parametrizations\.weight must be an nn\.Linear or nn\.Embedding, got Parametriz",
    ):
        qat(parametrized, "ct.int4_g32")


def test_both_uses_of_a_tied_weight_are_ignored_or_neither() -> None:
    """They are one tensor in the file."""
    options = {"embeddings": True, "head": True}
    for name in ("lm_head", "model.embed_tokens"):
        with pytest.raises(LayerError, match=r"are one weight.*name both in `ignore`, or neither"):
            qat(llama(tied=True), "gguf.q4_0", ignore=[name], **options)
    qat(llama(tied=True), "gguf.q4_0", ignore=["lm_head", "model.embed_tokens"], **options)
    staged = qat(decoder(), "gguf.q4_0", ignore=["model.embed_tokens"], **options)
    assert type(staged.model.embed_tokens) is nn.Embedding
    untied = qat(decoder(tied=False), "gguf.q4_0", ignore=["lm_head"], head=True)
    assert not isinstance(untied.lm_head, PreparedLinear)


def test_preparing_twice_rounds_the_heads_input_once() -> None:
    """The final norm has a single hook if the head is a tied weight and not a layer."""
    model = decoder()
    for _ in range(2):
        qat(model, "gguf.q4_0", embeddings=True, head=True)
    assert len(model.model.norm._forward_hooks) == 1


def test_an_embedding_with_max_norm_is_refused() -> None:
    """Its forward pass would change the weight after quantization."""
    with pytest.raises(LayerError, match=r"0 has max_norm=1\.0"):
        qat(nn.Sequential(nn.Embedding(8, 64, max_norm=1.0)), "gguf.q4_0", embeddings=True)


def test_the_learning_rate_warms_up_and_decays_to_zero() -> None:
    """It reaches the maximum once and ends below 0.1% of the maximum."""
    tuning = Tuning(steps=100, learning_rate=2e-4)
    rates = [tuning.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([2e-5 * (step + 1) for step in range(10)])
    assert max(rates) == pytest.approx(2e-4)
    assert all(current <= previous for previous, current in pairwise(rates[10:]))
    assert 0 < rates[-1] < 1e-3 * 2e-4


def test_learned_scales_can_have_another_learning_rate() -> None:
    """One Adam step moves parameters by the learning rate, so the distances show both rates."""
    model = qat(decoder(1), "ct.int4_g32", learned_scales=True)
    parameters_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tuning = Tuning(steps=1, batch_size=2, sequence_length=16, learning_rate=1e-3, scale_rate=20)
    tune(model, tokens(2, 17), tuning)
    moved = {
        name: float((p - parameters_before[name]).abs().max())
        for name, p in model.named_parameters()
    }
    for name, distance in moved.items():
        expected = 2e-2 if name.endswith("scale_factor") else 1e-3
        assert distance == pytest.approx(expected, rel=0.01), name
