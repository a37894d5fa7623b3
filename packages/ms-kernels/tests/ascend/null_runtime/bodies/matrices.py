"""Matrix products, summed in float32 and rounded once."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..signatures import Byte, Scalar, Short

__all__ = ["BODIES"]


def matmul(x: Tensor, other: Tensor, out: Tensor, mode: Byte) -> None:
    """``x @ other``; `mode` sets the precision of float32 products on the cube unit."""
    out.copy_(torch.matmul(_wide(x), _wide(other)))


def addmm_(
    x: Tensor, first: Tensor, second: Tensor, beta: Scalar, alpha: Scalar, mode: Byte
) -> None:
    """``beta * x + alpha * first @ second``, in place."""
    product = _wide(first) @ _wide(second) * alpha
    x.copy_(product if beta == 0 else _wide(x) * beta + product)


def addmm(
    x: Tensor,
    first: Tensor,
    second: Tensor,
    beta: Scalar,
    alpha: Scalar,
    out: Tensor,
    mode: Byte,
) -> None:
    """``beta * x + alpha * first @ second``."""
    out.copy_(_wide(x) * beta + _wide(first) @ _wide(second) * alpha)


def weight_quant_matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    bias: Tensor | None,
    group_size: Short,
    out: Tensor,
) -> None:
    """``x @ ((weight + offset) * scale) + bias``; scale and offset per column or per group of K."""
    if quant_scale is not None or quant_offset is not None:
        raise ValueError("quantized results are not implemented")
    dequantized = (_nibbles(weight) if weight.dtype == torch.int32 else weight).float()
    repeat = group_size or dequantized.shape[0]
    if offset is not None:
        dequantized = dequantized + _spread(offset, repeat, dequantized.shape[0])
    dequantized = dequantized * _spread(scale, repeat, dequantized.shape[0])
    result = x.float() @ dequantized
    out.copy_(result if bias is None else result + bias.float())


def weight_quant_matmul_v3(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    quant_scale: Tensor | None,
    quant_offset: Tensor | None,
    bias: Tensor | None,
    group_size: Short,
    inner_precise: Short,
    out: Tensor,
) -> None:
    """The same; `inner_precise` selects the accumulation precision."""
    weight_quant_matmul(x, weight, scale, offset, quant_scale, quant_offset, bias, group_size, out)


def _nibbles(weight: Tensor) -> Tensor:
    """Unpack signed 4-bit codes, eight per int32 along the contiguous dim, lowest first."""
    transposed = weight.stride(0) == 1 and weight.shape[1] > 1
    rows = (weight.T if transposed else weight).contiguous().view(torch.uint8)
    codes = torch.stack((rows & 15, rows >> 4), -1).flatten(-2)
    signed = (codes.to(torch.int8) ^ 8) - 8
    return signed.T if transposed else signed


def _spread(table: Tensor, repeat: int, rows: int) -> Tensor:
    """Expand a table with one row per group, or a single row, to one row per feature."""
    table = table.float().reshape(-1, table.shape[-1])
    return table.repeat_interleave(repeat, 0)[:rows]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


BODIES: dict[str, Callable[..., None]] = {
    "aclnnAddmm": addmm,
    "aclnnBatchMatMul": matmul,
    "aclnnInplaceAddmm": addmm_,
    "aclnnMatmul": matmul,
    "aclnnMm": matmul,
    "aclnnWeightQuantBatchMatmulV2": weight_quant_matmul,
    "aclnnWeightQuantBatchMatmulV3": weight_quant_matmul_v3,
}
