"""Decode attention over pages through npu_incre_flash_attention.

Pages (P, page, Hk, D) are passed as they are, as (P, page, Hk · D). The fused operator takes the
lengths as a list of the host's, so they are read and checked: the device is waited for once a call.
A sequence of no positions is given one, and its result set to 0; one whose table names a page that
does not exist gets the first page instead, and its result is NaN.
"""

import torch
from torch import Tensor

from ms_kernels.backends.ascend import HALVES, empty, on_npu
from ms_kernels.contracts.call import Call
from ms_kernels.errors import ArgumentError
from ms_kernels.operators.decode_attention.contract import CONTRACT

ALIGNMENT = 16
WIDEST = 512
MOST_HEADS = 256
WIDEST_PAGE = 2**16


def decode_attention(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale) v`` over each sequence's own positions."""
    batch, heads, width = q.shape
    page, key_heads = key_pages.shape[1:3]
    positions = page_table.shape[1] * page
    settings = lengths.tolist()
    wrong = [each for each in settings if not 0 <= each <= positions]
    if wrong:
        got, fits = f"{wrong[0]} somewhere", f"from 0 to {positions}"
        raise ArgumentError("decode_attention", "lengths", got, fits)
    none = (lengths == 0)[:, None]
    # What lies past a sequence's end may be any number; it must name a page all the same.
    first = torch.arange(page_table.shape[1], device=q.device) * page
    table = page_table.masked_fill(first >= lengths[:, None], 0)
    missing = (table < 0) | (table >= len(key_pages))
    table = table.masked_fill(missing, 0)
    result: Tensor = torch.ops.npu.npu_incre_flash_attention(
        q.reshape(batch, 1, heads * width),
        key_pages.flatten(2),
        value_pages.flatten(2),
        actual_seq_lengths=[max(each, 1) for each in settings],
        block_table=table,
        num_heads=heads,
        scale_value=width**-0.5 if scale is None else float(scale),
        input_layout="BSH",
        num_key_value_heads=key_heads,
        block_size=page,
        inner_precise=0,
    )
    result = result.view(batch, heads, width).masked_fill(none[..., None], 0)
    return result.masked_fill(missing.any(1)[:, None, None], torch.nan)


def _refuses(call: Call) -> str | None:
    """Decline windows and sizes that the fused kernel does not have."""
    q, pages = call.present[:2]
    if call.compiling:
        return "reads the lengths, which torch.compile cannot"
    if call.options[0] is not None:
        return "has no window"
    if pages.shape[1] % ALIGNMENT:
        return f"takes pages of a multiple of {ALIGNMENT} positions, not {pages.shape[1]}"
    if q.shape[2] > WIDEST or q.shape[1] > MOST_HEADS:
        return f"takes at most {MOST_HEADS} heads of at most {WIDEST}"
    if pages.shape[2] * pages.shape[3] > WIDEST_PAGE:
        return f"takes at most {WIDEST_PAGE} features a position over all heads"
    return empty(call)


IMPLEMENTATION = on_npu(
    CONTRACT,
    decode_attention,
    "npu_incre_flash_attention: reads each page once, where it lies",
    refuses=_refuses,
    dtypes=HALVES,
)
