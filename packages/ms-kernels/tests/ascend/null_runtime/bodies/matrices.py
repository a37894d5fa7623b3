"""Matrix products, summed in float32 and rounded once."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..signatures import Byte, Scalar, Short

__all__ = ["BODIES"]


def matmul(one: Tensor, other: Tensor, out: Tensor, mode: Byte) -> None:
    """``one @ other``; `mode` says how far the cube may round float32."""
    out.copy_(torch.matmul(_wide(one), _wide(other)))


def addmm_(
    one: Tensor, first: Tensor, second: Tensor, beta: Scalar, alpha: Scalar, mode: Byte
) -> None:
    """``beta · one + alpha · first @ second``, in place."""
    product = _wide(first) @ _wide(second) * alpha
    one.copy_(product if beta == 0 else _wide(one) * beta + product)


def addmm(
    one: Tensor,
    first: Tensor,
    second: Tensor,
    beta: Scalar,
    alpha: Scalar,
    out: Tensor,
    mode: Byte,
) -> None:
    """``beta · one + alpha · first @ second``."""
    out.copy_(_wide(one) * beta + _wide(first) @ _wide(second) * alpha)


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
    """``x @ ((weight + offset) · scale) + bias``; scale and offset a column, or a group of K."""
    if quant_scale is not None or quant_offset is not None:
        raise ValueError("quantized results have no body here")
    wide = (_nibbles(weight) if weight.dtype == torch.int32 else weight).float()
    repeat = group_size or wide.shape[0]
    if offset is not None:
        wide = wide + _spread(offset, repeat, wide.shape[0])
    wide = wide * _spread(scale, repeat, wide.shape[0])
    result = x.float() @ wide
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
    """The same; `inner_precise` chooses how sums are kept."""
    weight_quant_matmul(x, weight, scale, offset, quant_scale, quant_offset, bias, group_size, out)


def _nibbles(weight: Tensor) -> Tensor:
    """Signed codes of 4 bits, eight an int32 along the dim that is contiguous, lowest first."""
    transposed = weight.stride(0) == 1 and weight.shape[1] > 1
    rows = (weight.T if transposed else weight).contiguous().view(torch.uint8)
    codes = torch.stack((rows & 15, rows >> 4), -1).flatten(-2)
    signed = (codes.to(torch.int8) ^ 8) - 8
    return signed.T if transposed else signed


def _spread(table: Tensor, repeat: int, rows: int) -> Tensor:
    """One row a group, or a single one, to one row a feature."""
    table = table.float().reshape(-1, table.shape[-1])
    return table.repeat_interleave(repeat, 0)[:rows]


def _wide(given: Tensor) -> Tensor:
    return given.float() if given.dtype in (torch.float16, torch.bfloat16) else given


BODIES: dict[str, Callable[..., None]] = {
    "aclnnAddmm": addmm,
    "aclnnBatchMatMul": matmul,
    "aclnnInplaceAddmm": addmm_,
    "aclnnMatmul": matmul,
    "aclnnMm": matmul,
    "aclnnWeightQuantBatchMatmulV2": weight_quant_matmul,
    "aclnnWeightQuantBatchMatmulV3": weight_quant_matmul_v3,
}
