"""Attention of one query a sequence over a paged cache, in parts that fill the chip."""

import torch
from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.attention import LOG2_E
from ms_kernels.triton.launching import blocks, launch, power_of_two
from ms_kernels.triton.rows import empty, with_unit_stride

__all__ = ["decode_attention"]

MOST_PARTS = 64
"""Parts of one sequence; beyond 32,768 positions they grow."""


def _forward(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    window: int | None,
    scale: float | None,
) -> Tensor:
    q, keys, values = (
        with_unit_stride(q),
        with_unit_stride(key_pages),
        with_unit_stride(value_pages),
    )
    table = with_unit_stride(page_table)
    batch, heads, width = q.shape
    page, groups = keys.shape[1:3]
    positions = table.shape[1] * page
    place = configuration.place_of(q)
    constants, least = configuration.decoding(place, width, heads // groups)
    block = constants["BN"]
    part = max(least, blocks(blocks(positions, MOST_PARTS), block) * block)
    parts = blocks(positions, part)
    totals = q.new_empty((batch, heads, parts, width), dtype=torch.float32)
    tops, norms = totals.new_empty((2, batch, heads, parts))
    factor = (width**-0.5 if scale is None else scale) * LOG2_E
    reach = min(window or 0, positions)  # 32 bits wide in the kernel
    launch(
        "decode_attention.decode_parts",
        batch * groups * parts,
        q,
        *(q, keys, values, table, lengths.contiguous(), totals, tops, norms),
        *(heads, heads // groups, width, page, len(keys), positions, parts, part),
        *(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3]),
        *(table.stride(0), factor, reach),
        WINDOW=window is not None,
        **constants,
    )
    result = empty(q)
    launch(
        "decode_attention.decode_join",
        batch * heads,
        q,
        *(totals, tops, norms, result, width, parts),
        PARTS=power_of_two(parts),
        BD=constants["BD"],
        num_warps=4,
    )
    return result


def _fake(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    window: int | None,
    scale: float | None,
) -> Tensor:
    return empty(q)


decode_attention = opaque(CONTRACTS["decode_attention"], "triton", forward=_forward, fake=_fake)
