"""Decode attention: one new query per sequence over a paged key-value cache."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ms_kernels.contracts.arguments import Argument, Ladder, Work
from ms_kernels.contracts.call import Dims, accumulator
from ms_kernels.contracts.contract import Contract
from ms_kernels.contracts.indices import check_range, readable
from ms_kernels.contracts.options import scale_option, window_option
from ms_kernels.contracts.tolerance import ATTENTION


def decode_attention(
    q: Tensor,  # (B, Hq, D)
    key_pages: Tensor,  # (P, page, Hk, D)
    value_pages: Tensor,
    page_table: Tensor,  # (B, N)
    lengths: Tensor,  # (B,)
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale) v`` over the positions of each sequence, computed in float32.

    A length or page out of range is never used to index, and makes its sequence's result NaN.
    """
    batch, heads, width = q.shape
    count, page, groups = key_pages.shape[:3]
    wide = accumulator(q.dtype)
    position = torch.arange(page_table.shape[1] * page, device=q.device)
    visible = position < lengths[:, None]  # (B, N * page)
    if window is not None:
        visible = visible & (position >= lengths[:, None] - min(window, len(position)))
    # Table entries of pages without visible positions are not used, so their values are arbitrary.
    page_visible = visible.view(batch, page_table.shape[1], page).any(-1)
    used = page_table.masked_fill(~page_visible, 0).to(torch.int64)
    # Indexing would wrap around for a negative page, and fail on the device for one too large.
    missing = (used < 0) | (used >= count)
    invalid = missing.any(1) | (lengths < 0) | (lengths > len(position))
    used = used.masked_fill(missing, 0)
    keys, values = (
        pages[used].flatten(1, 2).to(wide).movedim(1, 2)  # (B, Hk, N * page, D)
        for pages in (key_pages, value_pages)
    )
    grouped = q.to(wide).reshape(batch, groups, heads // groups, width)
    scores = (grouped * (width**-0.5 if scale is None else scale)) @ keys.transpose(-1, -2)
    probs = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
    # The softmax of an empty sequence is 0 / 0, and 0 times unused memory must not be NaN.
    probs = probs.masked_fill(~visible[:, None, None], 0)
    values = values.masked_fill(~visible[:, None, :, None], 0)
    result = (probs @ values).reshape(batch, heads, width)
    return result.masked_fill(invalid[:, None, None], torch.nan).to(q.dtype)


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dims["Hq"] % dims["Hk"]:
        yield "key_pages", f"of a number of heads (third size) that divides q's {dims['Hq']}"


def _forward(dims: Dims, itemsize: int) -> Work:
    """Count the work with all pages of the table full."""
    positions = dims["B"] * dims["N"] * dims["page"]
    elements = 2 * positions * dims["Hk"] * dims["D"] + 2 * dims["B"] * dims["Hq"] * dims["D"]
    return Work(elements * itemsize, 4 * positions * dims["Hq"] * dims["D"])


def _table(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    return torch.randint(dims["P"], shape, generator=generator).to(torch.int32)


def _lengths(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw random lengths, including the maximum and 0."""
    limit = dims["N"] * dims["page"]
    lengths = torch.randint(limit + 1, shape, generator=generator)
    for index, length in enumerate((limit, 0)):
        lengths[index : index + 1] = length
    return lengths.to(torch.int32)


def _check_pages(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    window: int | None,
    scale: float | None,
) -> None:
    """Reject lengths beyond the table, and used table entries that are not pages."""
    if not (readable(page_table) and readable(lengths)):
        return
    count, page = key_pages.shape[:2]
    check_range("decode_attention", "lengths", lengths, page_table.shape[1] * page + 1)
    starts = torch.arange(page_table.shape[1]) * page
    used = starts < lengths[:, None]
    if window is not None:
        reach = min(window, page_table.shape[1] * page)  # lengths are 32-bit
        used &= starts + page > lengths[:, None] - reach
    check_range("decode_attention", "page_table", page_table[used], count)


CONTRACT = Contract(
    name="decode_attention",
    summary="one query per sequence over a paged cache of keys and values",
    arguments=(
        Argument(name="q", dims="B Hq D", differentiable=False),
        Argument(name="key_pages", dims="P page Hk D", like="q", differentiable=False),
        Argument(name="value_pages", dims="P page Hk D", like="q", differentiable=False),
        Argument(
            name="page_table",
            dims="B N",
            dtypes=(torch.int32,),
            differentiable=False,
            draw=_table,
        ),
        Argument(
            name="lengths", dims="B", dtypes=(torch.int32,), differentiable=False, draw=_lengths
        ),
    ),
    options=(window_option, scale_option),
    returns="(B Hq D), dtype of q; 0 where a length is 0",
    results={"result": "B Hq D"},
    splits=("B", "Hq Hk"),
    positive="Hq Hk D P page N",
    rules=_rules,
    check_values=_check_pages,
    forward=_forward,
    tolerance=ATTENTION,
    example={"B": 3, "Hq": 4, "Hk": 2, "D": 16, "P": 9, "page": 16, "N": 4},
    reference=decode_attention,
    ladders=(
        Ladder({"Hq": 8, "Hk": 2, "D": 64, "P": 32, "page": 16, "N": 8}, ("B",)),
        Ladder({"B": 4, "Hq": 8, "Hk": 2, "D": 64, "page": 16}, ("P", "N")),
    ),
)
