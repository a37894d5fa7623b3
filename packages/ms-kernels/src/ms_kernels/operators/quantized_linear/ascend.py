"""Products with packed weights through npu_weight_quant_batchmatmul.

Differences from the contract, bridged here:

1. The operator's codes are signed: the top bit of every code is flipped. Zeros become offsets,
   ``2 ** (bits - 1) - zero``.
2. Its weights are (K, N). 8-bit codes are passed as a transposed view, which it supports; 4-bit
   codes are repacked, with eight neighbors along N in one int32.
3. Both conversions are done once per packed tensor and cached, which doubles the memory of codes.
4. It has no gradient; here it is the product with the dequantized weight.

CANN rounds the weights to x's dtype before multiplying; the contract rounds only the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from ms_kernels.backends.ascend import HALVES, empty, on_npu
from ms_kernels.contracts.call import Call, describe
from ms_kernels.operators.quantized_linear.contract import CONTRACT
from ms_kernels.packed_weights import dequantize, unpack_codes

MAX_SIZE = 65_535
"""Maximum of K and N."""
GROUPING = 32
"""Group sizes must be a multiple of this."""
_signed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Cache by packed tensor: (tensor version, bits, signed codes)."""


def quantized_linear(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, *form: int
) -> Tensor:
    """Return ``x @ weight.T`` with the dequantized weight."""
    result: Tensor = _Product.apply(x, packed, scales.detach(), zeros, *form)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor | None, *form: int
    ) -> Tensor:
        ctx.save_for_backward(packed, scales, zeros)
        ctx.form = bits, group_size = form
        offsets = None if zeros is None else (2 ** (bits - 1) - zeros).T
        result: Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(
            x.reshape(-1, x.shape[-1]),
            _codes(packed, bits),
            scales.T,
            offsets,
            antiquant_group_size=0 if scales.shape[1] == 1 else group_size,
        )
        return result.view(*x.shape[:-1], len(packed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed, scales, zeros = ctx.saved_tensors
        bits, group_size = ctx.form
        weight = dequantize(packed, scales, zeros, bits=bits, group_size=group_size)
        grad_x = (grad.to(weight.dtype) @ weight).to(grad.dtype)
        return grad_x, None, None, None, None, None


def _codes(packed: Tensor, bits: int) -> Tensor:
    """Return signed codes, (K, N) int8 or (K, N / 8) int32; cached until `packed` is modified."""
    if torch.compiler.is_compiling() or type(packed) not in (Tensor, torch.nn.Parameter):
        return _convert_layout(packed, bits)
    cached = _signed[packed] if packed in _signed else (None, None, packed)  # noqa: SIM401 - untyped
    # Modified since, or used with other bits.
    if cached[:2] != (packed._version, bits):
        cached = (packed._version, bits, _convert_layout(packed, bits))
        _signed[packed] = cached
    codes: Tensor = cached[2]
    return codes


def _convert_layout(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        # Flipping the top bit maps codes 0..255 to -128..127.
        return (packed ^ 0x80).view(torch.int8).T
    codes = unpack_codes(packed, bits=bits).T
    # Two codes per byte, the first in the low half; then four bytes per int32.
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return (pairs ^ 0x88).contiguous().view(torch.int32)


def _refuses(call: Call) -> str | None:
    """Decline dtypes and sizes that the fused operator does not support."""
    x, packed, scales = call.present[:3]
    bits, group_size = call.options
    width, count = x.shape[-1], packed.shape[0]
    if scales.dtype != x.dtype:
        return f"needs scales of {describe(x.dtype)}, as x is, not {describe(scales.dtype)}"
    if scales.shape[1] > 1 and group_size % GROUPING:
        return f"needs groups of a multiple of {GROUPING} features, or one, not {group_size}"
    if max(width, count) > MAX_SIZE:
        return f"supports at most {MAX_SIZE} features"
    if bits == 4 and count % 8:
        return f"needs a number of output features divisible by 8 at 4 bits, not {count}"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    quantized_linear,
    "npu_weight_quant_batchmatmul: reads the codes, never the weights",
    refuses=_refuses,
    dtypes=HALVES,
)
