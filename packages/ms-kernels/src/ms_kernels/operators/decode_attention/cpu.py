"""Decode attention one sequence at a time over its pages in use, by torch's fused kernel."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ms_kernels.backends.cpu import on_cpu
from ms_kernels.contracts.call import Call
from ms_kernels.operators.decode_attention.contract import CONTRACT


def decode_attention(
    q: Tensor,  # (B, Hq, D)
    key_pages: Tensor,  # (P, page, Hk, D)
    value_pages: Tensor,
    page_table: Tensor,  # (B, N)
    lengths: Tensor,  # (B,)
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale) v`` over the positions of each sequence."""
    page = key_pages.shape[1]
    result = torch.zeros_like(q, memory_format=torch.contiguous_format)
    grouped = q.shape[1] != key_pages.shape[2]
    for row, length in enumerate(lengths.tolist()):
        if not length:
            continue
        first = 0 if window is None else max(length - window, 0)
        used = page_table[row, first // page : -(-length // page)].to(torch.int64)
        visible = slice(first % page, length - first // page * page)
        keys, values = (
            pages.index_select(0, used).flatten(0, 1)[visible].transpose(0, 1)  # (Hk, L, D)
            for pages in (key_pages, value_pages)
        )
        result[row] = F.scaled_dot_product_attention(
            q[row].unsqueeze(1)[None], keys[None], values[None], scale=scale, enable_gqa=grouped
        )[0, :, 0]
    return result


def _refuses(call: Call) -> str | None:
    """Decline calls that torch would not run with its fused kernel, and torch.compile."""
    if call.compiling:
        return "torch.compile cannot read the lengths"
    stride = call.present[0].strides[-1]
    if stride != 1:
        return f"torch's fused kernel needs a last stride of 1; q has {stride}"
    if call.dtype == torch.float64:
        return "float64 is for gradient checks, which use the reference"
    return None


IMPLEMENTATION = on_cpu(
    CONTRACT,
    decode_attention,
    "reads only the pages in use; torch's fused kernel",
    refuses=_refuses,
)
