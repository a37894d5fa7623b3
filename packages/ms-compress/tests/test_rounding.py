"""Codes and scales are those that each target's own library makes."""

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from onnxruntime.capi._pybind_state import quantize_matmul_4bits
from torch import Tensor

from ms_compress.quantization.rounding import quantize_weight, round_activations, round_weight
from ms_compress.targets.gguf.rules import Q8_BLOCKS
from ms_compress.targets.rules import NAMES, scheme

ROWS, FEATURES, GROUP = 64, 256, 32


def weights(size: float) -> Tensor:
    """Random rows, and among them zeros, ties of magnitude and values on the border of codes."""
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
    """Bit for bit, on rows with ties and zeros too."""
    weight = weights(size)
    kind = gguf.GGMLQuantizationType[name.removeprefix("gguf.").upper()]
    raw = gguf.quants.quantize(weight.numpy(), kind)
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
    across = np.ascontiguousarray(weight.numpy().T)
    quantize_matmul_4bits(packed, across, scales, zeros, GROUP, ROWS, FEATURES, True)
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

    But for the lowest weight of a group, on the border of two codes: the library gives it either,
    as its quotient happens to be rounded, and we always the even one.
    """
    weight = weights(size)
    arguments = QuantizationArgs(num_bits=bits, strategy=strategy, group_size=group, symmetric=True)
    groups = weight.view(ROWS, -1, group or FEATURES)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    codes = quantize(x=weight, scale=scales, zero_point=zeros, args=arguments, dtype=torch.int8)
    how = scheme(name)
    ours = quantize_weight(weight, how)
    assert torch.equal(ours.scales, scales)
    unlike = (ours.codes != codes).view(groups.shape)
    on_border = -groups == groups.abs().amax(-1, keepdim=True)
    assert bool((unlike <= on_border).all())
    assert bool((ours.codes.view(groups.shape)[unlike] == how.low).all())
    assert bool((codes.view(groups.shape)[unlike] == how.low + 1).all())


@pytest.mark.parametrize("name", NAMES)
def test_one_bit_of_a_weight_moves_hardly_a_code(name: str) -> None:
    """As sums in another order leave it: no weight lies on a border by the scheme's own doing.

    A quotient of up to 128 errs by 1e-5, so by chance that share of weights may cross a border.
    """
    torch.manual_seed(1)
    weight = torch.randn(512, FEATURES)
    codes = quantize_weight(weight, scheme(name)).codes
    for far in (-torch.inf, torch.inf):
        near = torch.nextafter(weight, torch.full_like(weight, far))
        moved = quantize_weight(near, scheme(name)).codes != codes
        assert float(moved.float().mean()) < 5e-5


@pytest.mark.parametrize("size", [1e-37, 1e-38, 1e-44])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_too_small_for_an_inverse_is_rounded_to_numbers(name: str, size: float) -> None:
    """Weights whose scale has no finite inverse; the smallest of them lie below float32's range."""
    rounded = round_weight(weights(size), scheme(name))
    assert bool(rounded.isfinite().all())
    assert bool((rounded[3, :32] == 0).all())


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_what_training_computes_with_is_what_codes_stand_for(name: str, learned: bool) -> None:
    """The forward's weight equals codes times scales exactly, with scales of the target's dtype."""
    how = scheme(name)
    weight = weights(0.05)
    groups = FEATURES // how.group_of(FEATURES)
    factor = 0.1 * torch.randn(ROWS, groups) if learned else None
    found = quantize_weight(weight, how, factor)
    assert found.scales.dtype == how.dtype
    assert int(found.codes.min()) >= how.low
    assert int(found.codes.max()) <= how.high
    assert torch.equal(round_weight(weight, how, factor), found.weight())


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    """A pruned weight has code zero whatever its neighbors are, so masks survive quantization."""
    weight = weights(1.0)
    weight[torch.rand(weight.shape) < 0.5] = 0
    rounded = round_weight(weight, scheme(name))
    assert bool((rounded[weight == 0] == 0).all())


@pytest.mark.parametrize("size", [1.0, 1e-37, 1e-38, 1e-44])
def test_blocks_of_inputs_are_rounded_as_llama_cpp_does(size: float) -> None:
    """Its x86 rule in numpy's single precision: 127 / max once, products to the even neighbor."""
    torch.manual_seed(2)
    x = torch.cat([torch.randn(2048, 256).bfloat16().float(), weights(1.0)]) * size
    blocks = x.numpy().reshape(-1, 8, 32)
    peak = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        scale = (peak / np.float32(127)).astype(np.float16).astype(np.float32)
        inverse = np.float32(127) / peak
    inverse[~np.isfinite(inverse)] = 0
    there = np.rint(blocks * inverse) * scale
    np.testing.assert_array_equal(round_activations(x, Q8_BLOCKS), there.reshape(x.shape))


def test_blocks_of_inputs_are_rounded_as_q8_0() -> None:
    """Inputs agree with the library's Q8_0 but for values on a border, which x86 rounds to even."""
    x = torch.randn(64, 256)
    there = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    back = torch.from_numpy(gguf.quants.dequantize(there, gguf.GGMLQuantizationType.Q8_0))
    ours = round_activations(x, Q8_BLOCKS)
    step = x.view(64, 8, 32).abs().amax(-1, keepdim=True) / 127
    apart = (ours - back).view(64, 8, 32).abs() / step
    assert float(apart.max()) <= 1.01  # one code, on a border
    assert float((apart > 0.01).float().mean()) < 1e-3
