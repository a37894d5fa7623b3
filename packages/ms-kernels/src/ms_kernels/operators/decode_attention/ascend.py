"""Decode attention over pages through npu_incre_flash_attention.

Pages (P, page, Hk, D) are passed without a copy as (P, page, Hk · D). The fused operator takes the
lengths as a host list, so they are read and checked, with one device synchronization per call.
An empty sequence is passed with length 1 and its result set to 0. A page that does not exist is
replaced by the first page, and the result of its sequence is NaN.
"""

import torch
from torch import Tensor

from ms_kernels.backends.ascend import HALVES, empty, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.errors import ArgumentError
from ms_kernels.operators.decode_attention.contract import CONTRACT

ALIGNMENT = 16
MAX_WIDTH = 512
MAX_HEADS = 256
MAX_PAGE_WIDTH = 2**16


def decode_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale) v`` over the positions of each sequence."""
    batch, heads, width = q.shape
    page, key_heads = key_pages.shape[1:3]
    positions = page_table.shape[1] * page
    host_lengths = lengths.tolist()
    invalid = [length for length in host_lengths if not 0 <= length <= positions]
    if invalid:
        got, fits = f"out of range ({invalid[0]})", f"from 0 to {positions}"
        raise ArgumentError("decode_attention", "lengths", got, fits)
    is_empty = (lengths == 0)[:, None]
    # Table entries past a sequence's end are arbitrary, but the operator needs valid pages there.
    first = torch.arange(page_table.shape[1], device=q.device) * page
    table = page_table.masked_fill(first >= lengths[:, None], 0)
    missing = (table < 0) | (table >= len(key_pages))
    table = table.masked_fill(missing, 0)
    result: Tensor = torch.ops.npu.npu_incre_flash_attention(
        q.reshape(batch, 1, heads * width),
        key_pages.flatten(2),
        value_pages.flatten(2),
        actual_seq_lengths=[max(length, 1) for length in host_lengths],
        block_table=table,
        num_heads=heads,
        scale_value=width**-0.5 if scale is None else float(scale),
        input_layout="BSH",
        num_key_value_heads=key_heads,
        block_size=page,
        inner_precise=0,
    )
    result = result.view(batch, heads, width).masked_fill(is_empty[..., None], 0)
    return result.masked_fill(missing.any(1)[:, None, None], torch.nan)


def _refuses(call: Call) -> str | None:
    """Decline windows and sizes that the fused kernel does not support."""
    q, pages = call.present[:2]
    if call.compiling:
        return "reads the lengths, which torch.compile cannot"
    if call.options[0] is not None:
        return "does not support a window"
    if pages.shape[1] % ALIGNMENT:
        return f"needs pages of a multiple of {ALIGNMENT} positions, not {pages.shape[1]}"
    if q.shape[2] > MAX_WIDTH or q.shape[1] > MAX_HEADS:
        return f"supports at most {MAX_HEADS} heads of at most {MAX_WIDTH}"
    if pages.shape[2] * pages.shape[3] > MAX_PAGE_WIDTH:
        return f"supports at most {MAX_PAGE_WIDTH} features per position over all heads"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    decode_attention,
    "npu_incre_flash_attention: reads each page once, in place",
    refuses=_refuses,
    dtypes=HALVES,
)
