"""Attention of one new query a sequence over keys and values kept in pages."""

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
    """Return ``softmax(q kᵀ · scale) v`` over each sequence's own positions, in float32.

    A sequence whose length or page does not exist reads nothing of it, and its result is NaN.
    """
    batch, heads, width = q.shape
    count, page, groups = key_pages.shape[:3]
    wide = accumulator(q.dtype)
    place = torch.arange(page_table.shape[1] * page, device=q.device)
    seen = place < lengths[:, None]  # (B, N * page)
    if window is not None:
        seen = seen & (place >= lengths[:, None] - min(window, len(place)))
    # What holds no position that is seen is never looked up: any number may stand there.
    held = seen.view(batch, page_table.shape[1], page).any(-1)
    used = page_table.masked_fill(~held, 0).to(torch.int64)
    # Indexing would take a negative page from the end, and stop an accelerator for one too large.
    missing = (used < 0) | (used >= count)
    wrong = missing.any(1) | (lengths < 0) | (lengths > len(place))
    used = used.masked_fill(missing, 0)
    keys, values = (
        pages[used].flatten(1, 2).to(wide).movedim(1, 2)  # (B, Hk, N * page, D)
        for pages in (key_pages, value_pages)
    )
    grouped = q.to(wide).reshape(batch, groups, heads // groups, width)
    scores = (grouped * (width**-0.5 if scale is None else scale)) @ keys.transpose(-1, -2)
    shares = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    # A sequence of no positions has no shares (0 / 0), and garbage times 0 must not be NaN.
    shares = shares.masked_fill(~seen[:, None, None], 0)
    values = values.masked_fill(~seen[:, None, :, None], 0)
    result = (shares @ values).reshape(batch, heads, width)
    return result.masked_fill(wrong[:, None, None], torch.nan).to(q.dtype)


def _rules(dims: Dims, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if dims["Hq"] % dims["Hk"]:
        yield "key_pages", f"of a number of heads (third size) that divides q's {dims['Hq']}"


def _forward(dims: Dims, itemsize: int) -> Work:
    """Count the work, every page of the table as full."""
    positions = dims["B"] * dims["N"] * dims["page"]
    elements = 2 * positions * dims["Hk"] * dims["D"] + 2 * dims["B"] * dims["Hq"] * dims["D"]
    return Work(elements * itemsize, 4 * positions * dims["Hq"] * dims["D"])


def _table(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    return torch.randint(dims["P"], shape, generator=generator).to(torch.int32)


def _lengths(shape: tuple[int, ...], dims: Dims, generator: torch.Generator) -> Tensor:
    """Draw lengths, none and all among them."""
    limit = dims["N"] * dims["page"]
    drawn = torch.randint(limit + 1, shape, generator=generator)
    for place, length in enumerate((limit, 0)):
        drawn[place : place + 1] = length
    return drawn.to(torch.int32)


def _check_pages(
    q: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    window: int | None,
    scale: float | None,
) -> None:
    """Refuse a length beyond the table, and an entry in use that is no page."""
    if not (readable(page_table) and readable(lengths)):
        return
    count, page = key_pages.shape[:2]
    check_range("decode_attention", "lengths", lengths, page_table.shape[1] * page + 1)
    starts = torch.arange(page_table.shape[1]) * page
    used = starts < lengths[:, None]
    if window is not None:
        reach = min(window, page_table.shape[1] * page)  # lengths are of 32 bits
        used &= starts + page > lengths[:, None] - reach
    check_range("decode_attention", "page_table", page_table[used], count)


CONTRACT = Contract(
    name="decode_attention",
    summary="one query a sequence over a paged cache of keys and values",
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
