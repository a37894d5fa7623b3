"""Codes and scales match each target's own library."""

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from models import SINGLE_LEVEL
from onnxruntime.capi._pybind_state import quantize_matmul_4bits
from torch import Tensor

from ms_compress.quantization.rounding import quantize_weight, round_activations, round_weight
from ms_compress.targets.gguf.rules import Q8_BLOCKS
from ms_compress.targets.rules import scheme

ROWS, FEATURES, GROUP = 64, 256, 32


def weights(size: float) -> Tensor:
    """Return random rows with zeros, ties of magnitude and values on borders between codes."""
    torch.manual_seed(0)
    weight = torch.randn(ROWS, FEATURES)
    weight[3, :32] = 0
    weight[5, 0], weight[5, 7] = 9.0, -9.0
    weight[6, 2], weight[6, 9] = -9.0, 9.0
    weight[10:20] = torch.randint(-8, 8, (10, FEATURES)) * 0.5
    return weight * size


@pytest.mark.parametrize("size", [1.0, 0.02, 3000.0])
@pytest.mark.parametrize("name", ["gguf.q8_0", "gguf.q4_0"])
def test_gguf_codes_equal_its_library(name: str, size: float) -> None:
    """Bit for bit, also for rows with ties and zeros."""
    weight = weights(size)
    quant_type = gguf.GGMLQuantizationType[name.removeprefix("gguf.").upper()]
    raw = gguf.quants.quantize(weight.numpy(), quant_type)
    blocks = raw.reshape(ROWS * FEATURES // GROUP, -1)
    scales = blocks[:, :2].copy().view(np.float16).reshape(ROWS, -1)
    body = blocks[:, 2:]
    if name == "gguf.q8_0":
        codes = body.copy().view(np.int8)
    else:
        codes = np.concatenate([body & 15, body >> 4], axis=-1).astype(np.int8) - 8
    ours = quantize_weight(weight, scheme(name))
    np.testing.assert_array_equal(ours.codes.numpy(), codes.reshape(ROWS, FEATURES))
    np.testing.assert_array_equal(ours.scales.numpy(), scales)


@pytest.mark.parametrize("size", [1.0, 0.02, 3000.0])
def test_onnxruntime_codes_equal_its_quantizer(size: float) -> None:
    """MLAS's symmetric blockwise quantizer, bit for bit."""
    weight = weights(size)
    packed = np.zeros((ROWS, FEATURES // GROUP, GROUP // 2), dtype=np.uint8)
    scales = np.zeros((ROWS, FEATURES // GROUP), dtype=np.float32)
    zeros = np.zeros((ROWS, FEATURES // GROUP // 2), dtype=np.uint8)
    transposed = np.ascontiguousarray(weight.numpy().T)
    quantize_matmul_4bits(packed, transposed, scales, zeros, GROUP, ROWS, FEATURES, True)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).astype(np.int8) - 8
    ours = quantize_weight(weight, scheme("ort.matmulnbits"))
    np.testing.assert_array_equal(ours.codes.numpy(), codes.reshape(ROWS, FEATURES))
    np.testing.assert_array_equal(ours.scales.numpy(), scales)


@pytest.mark.parametrize("size", [1.0, 0.02, 3000.0])
@pytest.mark.parametrize(
    ("name", "bits", "strategy", "group"),
    [
        ("ct.int4_g32", 4, "group", 32),
        ("ct.int3_g64", 3, "group", 64),
        ("ct.w8a8", 8, "channel", None),
    ],
)
def test_compressed_tensors_codes_equal_its_library(
    name: str, bits: int, strategy: str, group: int | None, size: float
) -> None:
    """Scales of `calculate_qparams` and codes of `quantize`, bit for bit.

    Except for a group's lowest weight, on the border of two codes: the library gives either,
    depending on the rounding of its quotient, and ours is always the even one.
    """
    weight = weights(size)
    arguments = QuantizationArgs(num_bits=bits, strategy=strategy, group_size=group, symmetric=True)
    groups = weight.view(ROWS, -1, group or FEATURES)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    codes = quantize(x=weight, scale=scales, zero_point=zeros, args=arguments, dtype=torch.int8)
    quant_scheme = scheme(name)
    ours = quantize_weight(weight, quant_scheme)
    assert torch.equal(ours.scales, scales)
    different = (ours.codes != codes).view(groups.shape)
    on_border = -groups == groups.abs().amax(-1, keepdim=True)
    assert bool((different <= on_border).all())
    assert bool((ours.codes.view(groups.shape)[different] == quant_scheme.low).all())
    assert bool((codes.view(groups.shape)[different] == quant_scheme.low + 1).all())


@pytest.mark.parametrize("name", SINGLE_LEVEL)
def test_one_bit_of_a_weight_rarely_changes_a_code(name: str) -> None:
    """As from sums in another order: the scheme itself puts no weight on a border.

    A quotient of up to 128 has an error of 1e-5, so about that fraction may cross a border.
    """
    torch.manual_seed(1)
    weight = torch.randn(512, FEATURES)
    codes = quantize_weight(weight, scheme(name)).codes
    for direction in (-torch.inf, torch.inf):
        neighbor = torch.nextafter(weight, torch.full_like(weight, direction))
        moved = quantize_weight(neighbor, scheme(name)).codes != codes
        assert float(moved.float().mean()) < 5e-5


@pytest.mark.parametrize("size", [1e-37, 1e-38, 1e-44])
@pytest.mark.parametrize("name", SINGLE_LEVEL)
def test_tiny_weights_round_to_finite_numbers(name: str, size: float) -> None:
    """Scales without a finite inverse; the smallest weights are denormal."""
    rounded = round_weight(weights(size), scheme(name))
    assert bool(rounded.isfinite().all())
    assert bool((rounded[3, :32] == 0).all())


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", SINGLE_LEVEL)
def test_training_uses_exactly_the_dequantized_codes(name: str, learned: bool) -> None:
    """The forward pass uses codes times scales exactly, with scales of the target's dtype."""
    quant_scheme = scheme(name)
    weight = weights(0.05)
    scale_shape = quant_scheme.scale_shape(ROWS, FEATURES)
    factor = 0.1 * torch.randn(scale_shape) if learned else None
    quantized = quantize_weight(weight, quant_scheme, factor)
    assert quantized.scales.dtype == quant_scheme.dtype
    assert float(quantized.codes.float().min()) >= quant_scheme.low
    assert float(quantized.codes.float().max()) <= quant_scheme.high
    assert torch.equal(round_weight(weight, quant_scheme, factor), quantized.weight())


@pytest.mark.parametrize("name", [name for name in SINGLE_LEVEL if scheme(name).has_zero])
def test_zeros_stay_zeros(name: str) -> None:
    """A pruned weight has code zero next to any neighbors, so masks survive quantization."""
    weight = weights(1.0)
    weight[torch.rand(weight.shape) < 0.5] = 0
    rounded = round_weight(weight, scheme(name))
    assert bool((rounded[weight == 0] == 0).all())


@pytest.mark.parametrize("size", [1.0, 1e-37, 1e-38, 1e-44])
def test_input_blocks_are_rounded_as_in_llama_cpp(size: float) -> None:
    """Its x86 rule in single-precision numpy: 127 / max once, products to nearest even."""
    torch.manual_seed(2)
    x = torch.cat([torch.randn(2048, 256).bfloat16().float(), weights(1.0)]) * size
    blocks = x.numpy().reshape(-1, 8, 32)
    peak = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        scale = (peak / np.float32(127)).astype(np.float16).astype(np.float32)
        inverse = np.float32(127) / peak
    inverse[~np.isfinite(inverse)] = 0
    expected = np.rint(blocks * inverse) * scale
    np.testing.assert_array_equal(round_activations(x, Q8_BLOCKS), expected.reshape(x.shape))


def test_input_blocks_are_rounded_as_q8_0() -> None:
    """Equal to the library's Q8_0 except for values on a border, which x86 rounds to even."""
    x = torch.randn(64, 256)
    quantized = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    expected = torch.from_numpy(gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0))
    actual = round_activations(x, Q8_BLOCKS)
    step = x.view(64, 8, 32).abs().amax(-1, keepdim=True) / 127
    difference = (actual - expected).view(64, 8, 32).abs() / step
    assert float(difference.max()) <= 1.01  # one code, on a border
    assert float((difference > 0.01).float().mean()) < 1e-3
