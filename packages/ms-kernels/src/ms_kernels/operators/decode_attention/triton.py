"""Attention of one query per sequence over a paged cache, split into parts that fill the chip."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ms_kernels.backends.triton.configuration import grid, tuned_kernels
from ms_kernels.backends.triton.implementation import narrow_heads, on_gpu
from ms_kernels.backends.triton.launching import blocks, launch, power_of_two
from ms_kernels.backends.triton.rows import empty, with_unit_stride
from ms_kernels.core.entries import DTYPES, Entry, entry
from ms_kernels.core.launches import ANY_SIZE, TableKey, key_of
from ms_kernels.operators.attention.triton import LOG2_E
from ms_kernels.operators.decode_attention.contract import CONTRACT

MAX_PARTS = 64
"""Maximum parts per sequence; beyond 32,768 positions the parts get longer."""

_PARTS = {"POSITIONS": 512, "num_warps": 4, "num_stages": 2}
(PARTS,) = TUNED = tuned_kernels(
    "decode_attention",
    "decode_parts",
    sizes="D",
    tried_at=tuple(
        {"B": 32, "Hq": 32, "Hk": 8, "D": width, "P": 8192, "page": 16, "N": 256}
        for width in (64, 128)
    ),
    candidates=grid(BN=(32, 64, 128), POSITIONS=(256, 512), num_warps=(4, 8), num_stages=(2, 3)),
    defaults=((ANY_SIZE, {"BN": 64, **_PARTS}),),
    wide_defaults=((ANY_SIZE, {"BN": 32, **_PARTS}),),
)
KERNELS = f"{__package__}.kernels"


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
    constants, min_positions = _constants(key_of(q), width, heads // groups)
    block = constants["BN"]
    # At least min_positions per part, and few enough parts for the second kernel to load at once.
    part_positions = max(min_positions, blocks(blocks(positions, MAX_PARTS), block) * block)
    parts = blocks(positions, part_positions)
    partial_outputs = q.new_empty((batch, heads, parts, width), dtype=torch.float32)
    maxima, sums = partial_outputs.new_empty((2, batch, heads, parts))
    factor = (width**-0.5 if scale is None else scale) * LOG2_E  # the kernel uses exp2
    reach = min(window or 0, positions)  # fits in the kernel's 32 bits
    launch(
        f"{KERNELS}.decode_parts",
        batch * groups * parts,
        q,
        *(q, keys, values, table, lengths.contiguous(), partial_outputs, maxima, sums),
        *(heads, heads // groups, width, page, len(keys), positions, parts, part_positions),
        *(*q.stride()[:2], *keys.stride()[:3], *values.stride()[:3]),
        *(table.stride(0), factor, reach),
        WINDOW=window is not None,
        **constants,
    )
    result = empty(q)
    launch(
        f"{KERNELS}.combine_parts",
        batch * heads,
        q,
        *(partial_outputs, maxima, sums, result, width, parts),
        PARTS=power_of_two(parts),
        BD=constants["BD"],
        num_warps=4,
    )
    return result


def _constants(key: TableKey, width: int, group: int) -> tuple[dict[str, int], int]:
    """Return the constants of a launch, and the positions per part.

    Args:
        key: chip and dtype.
        width: head dimension.
        group: number of query heads per key head.
    """
    values = PARTS.values(key, width)
    positions = values.pop("POSITIONS")
    # tl.dot needs at least 16 rows and columns
    members, features = (max(power_of_two(size), 16) for size in (group, width))
    return {"GROUP": members, **values, "BD": features}, positions


def entries(chip: str, dtype: str) -> Iterator[Entry]:
    """Yield the kernels of an ahead-of-time library, for up to 16 query heads per key head."""
    common: dict[str, Any] = {"fp32": "PART MAXIMUM EXP_SUM scale", "i32": "TABLE LENGTHS"}
    for width in (64, 128):
        constants, _ = _constants(TableKey(chip, DTYPES[dtype]), width, 16)
        for windowed in (False, True):
            yield entry(
                "decode_attention",
                f"{KERNELS}.decode_parts",
                dtype,
                f"{width}{'_window' * windowed}",
                {**constants, "WINDOW": windowed},
                "batch * (heads / group) * parts",
                limits={"width": "BD", "group": "GROUP"},
                extra=("batch",),
                **common,
            )
        yield entry(
            "decode_attention",
            f"{KERNELS}.combine_parts",
            dtype,
            width,
            {"PARTS": MAX_PARTS, "BD": width},
            "batch * heads",
            limits={"width": "BD", "parts": "PARTS"},
            extra=("batch", "heads"),
            **common,
        )


IMPLEMENTATION = on_gpu(
    CONTRACT,
    "reads each page once, many parts of a sequence at a time",
    tuned=TUNED,
    entries=entries,
    refuses=narrow_heads,
    forward=_forward,
)
