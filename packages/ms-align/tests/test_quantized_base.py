"""Adapters on bases of 4 or 8 bits: formats, products, training, merged models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ms_align.engines.assembly import open_model, start_engine
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.options import EngineOptions
from ms_align.errors import ConfigError
from ms_align.lora.adapters import add_lora
from ms_align.lora.layers import LoraLinear
from ms_align.lora.loading import load_lora
from ms_align.lora.options import LoraOptions
from ms_align.lora.quantized_base import NF4, QuantizedLinear
from ms_align.losses.sft import SFTLoss
from ms_parallel import save_model

from .small_models import decoder

FORMATS = ("nf4", "int8", "fp8")
BITS = {"nf4": 4 + 8 / 64 + 32 / (64 * 256), "int8": 8, "fp8": 8}
PUBLISHED_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""QLoRA, appendix E."""


def layer_of(outputs: int, inputs: int, *, bias: bool = True) -> nn.Linear:
    """Layer of random weights, drawn from a fixed seed."""
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias)


def test_nf4_has_the_published_values() -> None:
    """Within float32 of the table in the paper."""
    torch.testing.assert_close(NF4, torch.tensor(PUBLISHED_NF4), rtol=0, atol=2e-7)


@pytest.mark.parametrize("shape", [(32, 64), (48, 40), (7, 5), (1, 1), (300, 257)])
@pytest.mark.parametrize("name", FORMATS)
def test_rounding_errors_are_bounded(name: str, shape: tuple[int, int]) -> None:
    """By half the widest gap of NF4, half an integer, or half an e4m3 step, times the maximum."""
    layer = layer_of(*shape)
    rounded = QuantizedLinear(layer, name).weight
    weight = layer.weight.detach()
    assert rounded.shape == weight.shape
    error = (rounded - weight).abs()
    if name == "nf4":
        blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        largest = blocks.abs().amax(1).repeat_interleave(64)[: weight.numel()].view(shape)
        # Half of the gap from -1 to -0.696, and the rounding of scales to 8 bits.
        assert bool((error <= 0.152 * largest + 0.01 * blocks.abs().max()).all())
    else:
        largest = weight.abs().amax(1, keepdim=True)
        bound = 0.5 / 127 if name == "int8" else 2**-4
        assert bool((error <= bound * largest * (1 + 1e-5)).all())


@pytest.mark.parametrize("name", FORMATS)
def test_weights_take_the_bits_of_their_format(name: str) -> None:
    """Buffers of a large layer, without float copies."""
    layer = QuantizedLinear(layer_of(512, 512, bias=False), name)
    stored = sum(buffer.nbytes for buffer in layer.buffers())
    assert stored == pytest.approx(512 * 512 * BITS[name] / 8, rel=0.01)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("name", FORMATS)
def test_products_and_gradients_are_those_of_the_rounded_weight(name: str) -> None:
    """The expanded weight is not saved for the backward."""
    layer = QuantizedLinear(layer_of(48, 40), name)
    plain = layer.plain(layer.weight)
    x = torch.randn(3, 5, 40, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert torch.equal(y, plain(x))
    assert all(tensor.numel() < 48 * 40 for tensor in saved)
    gradient = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, gradient)
    (expected,) = torch.autograd.grad(plain(x), x, gradient)
    torch.testing.assert_close(dx, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_an_adapter_trains_on_a_quantized_base_and_merges(name: str, tmp_path: Path) -> None:
    """Only the adapter changes; the merged model gives the adapted one's logits."""
    torch.manual_seed(0)
    options = LoraOptions(rank=4, quantize_base=name, target_modules="all-linear")
    model = add_lora(decoder(), options)
    tokens = torch.randint(48, (2, 16))
    before = {key: tensor.clone() for key, tensor in model.named_buffers()}
    engine = LocalEngine(model, OptimizerOptions(learning_rate=0.02))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    losses = [engine.step(batch, SFTLoss()).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.named_buffers())
    with torch.no_grad():
        adapted = model(tokens)
        model.merge()
        assert all(type(layer.base_layer) is nn.Linear for layer in model.adapters().values())
        torch.testing.assert_close(model(tokens), adapted, rtol=1e-4, atol=1e-5)
        model.unmerge()
        assert torch.equal(model(tokens), adapted)
        with model.as_merged() as plain:
            save_model(plain, tmp_path / "model")
        torch.testing.assert_close(
            open_model(tmp_path / "model")(tokens), adapted, rtol=1e-4, atol=1e-5
        )
        assert torch.equal(model(tokens), adapted)


def test_the_adapter_file_loads_on_a_plain_base(tmp_path: Path) -> None:
    """As with QLoRA's files, users may quantize the base again."""
    model = decoder()
    adapted = add_lora(model, LoraOptions(rank=4, quantize_base="nf4"))
    for layer in adapted.adapters().values():
        nn.init.normal_(layer.lora_B)
    adapted.save_pretrained(tmp_path)
    loaded = load_lora(decoder(), tmp_path)
    for name, layer in loaded.adapters().items():
        assert torch.equal(layer.lora_B, adapted.adapters()[name].lora_B)


def test_what_does_not_work_is_refused_in_one_line(tmp_path: Path) -> None:
    """Damaged weights, a layout, an unknown format."""
    layer = layer_of(4, 4)
    with torch.no_grad():
        layer.weight[0, 0] = float("nan")
    with pytest.raises(ConfigError, match=r"NaN or infinity.*quantize_base='int8'"):
        LoraLinear(layer, LoraOptions(rank=2, quantize_base="int8"))
    save_model(decoder(), tmp_path / "model")
    lora: Any = {"quantize_base": "nf4"}
    options = EngineOptions(mixed_precision=True)
    with pytest.raises(ConfigError, match=r"needs unsplit float32 .* mixed_precision is True"):
        start_engine(tmp_path / "model", layout={"data": 1}, lora=lora, options=options)
    with pytest.raises(ConfigError, match="tensor is 2; leave tensor at its default"):
        start_engine(tmp_path / "model", layout={"tensor": 2}, lora=lora)
    with pytest.raises(ConfigError, match=r"quantize_base .*'nf5'.*'nf4'"):
        LoraOptions(quantize_base="nf5")
