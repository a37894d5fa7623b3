"""Block sizes, warps and stages of each kernel: committed tables, so that every rank agrees.

Nothing here is measured in a run. A figure's key is the chip, or ``"any"`` for those that have no
line of their own.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from ms_kernels.triton.launching import blocks, power_of_two

__all__ = [
    "BACKWARD_KEYS",
    "BACKWARD_QUERIES",
    "FORWARD",
    "attention",
    "decoding",
    "elements",
    "for_chip",
    "rotary",
    "row_blocks",
    "shares",
    "tile",
    "whole_rows",
]

_Line = TypeVar("_Line")

NORM_PROGRAMS = MappingProxyType({"any": 256, "sm_80": 216, "sm_90": 264, "sm_100": 296})
"""Programs of a normalisation's backward pass: two for each multiprocessor of the chip.

Each keeps its own sum of the weight's gradient, so their number belongs to the result.
"""


def for_chip(table: Mapping[str, _Line], chip: str) -> _Line:
    """Return the line of `chip`, or that of any chip."""
    return table.get(chip, table["any"])


def shares(rows: int, at_once: int, chip: str) -> tuple[int, int]:
    """Return rows a program, and programs, of a normalisation's backward pass.

    Args:
        rows: rows in all.
        at_once: rows that a program holds at once; its share is a multiple of it.
        chip: as `NORM_PROGRAMS` names it.
    """
    each = blocks(blocks(rows, at_once), for_chip(NORM_PROGRAMS, chip)) * at_once
    return max(each, at_once), blocks(rows, max(each, at_once))


def whole_rows(width: int) -> dict[str, int]:
    """Return the constants of a kernel that holds whole rows of `width` elements."""
    block = power_of_two(width)
    rows = max(2048 // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": _warps(rows * block, 512, 16)}


def elements(width: int) -> dict[str, int]:
    """Return the constants of an element-wise kernel over rows of `width` elements."""
    block = min(power_of_two(width), 2048)
    return {"ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}


def row_blocks(width: int) -> dict[str, int]:
    """Return the constants of a kernel that walks along a row of `width` elements."""
    block = min(power_of_two(width), 4096)
    return {"BLOCK": block, "num_warps": _warps(block, 512, 8)}


def _warps(count: int, each: int, most: int) -> int:
    return min(max(count // each, 1), most)


# (BM, BN, warps, stages) by chip, then by bytes of an element and head width up to.
_Blocks = tuple[int, int, int, int]
_Table = Mapping[str, Mapping[tuple[int, int], _Blocks]]

_SMALL_FORWARD = {
    (2, 64): (128, 64, 4, 2),
    (2, 128): (128, 32, 4, 1),
    (2, 256): (64, 32, 8, 1),
    (4, 64): (64, 32, 4, 1),
    (4, 128): (32, 32, 4, 1),
    (4, 256): (16, 16, 4, 1),
}
_SMALL_BACKWARD = {
    (2, 64): (64, 64, 8, 1),
    (2, 128): (32, 64, 8, 1),
    (2, 256): (32, 32, 8, 1),
    (4, 64): (32, 32, 4, 1),
    (4, 128): (16, 32, 4, 1),
    (4, 256): (16, 16, 4, 1),
}

FORWARD: _Table = MappingProxyType(
    {
        "any": _SMALL_FORWARD,
        "sm_90": {
            **_SMALL_FORWARD,
            (2, 64): (128, 128, 8, 2),
            (2, 128): (128, 64, 8, 3),
            (2, 256): (128, 32, 8, 2),
        },
    }
)
"""Attention's forward pass."""

BACKWARD_QUERIES: _Table = MappingProxyType(
    {
        "any": _SMALL_BACKWARD,
        "sm_90": {
            **_SMALL_BACKWARD,
            (2, 64): (64, 128, 8, 2),
            (2, 128): (128, 64, 8, 2),
            (2, 256): (64, 32, 8, 2),
        },
    }
)
"""The gradient of attention's queries."""

BACKWARD_KEYS: _Table = MappingProxyType(
    {
        "any": _SMALL_BACKWARD,
        "sm_90": {
            **_SMALL_BACKWARD,
            (2, 64): (64, 128, 8, 2),
            (2, 128): (32, 128, 8, 1),
            (2, 256): (64, 32, 8, 1),
        },
    }
)
"""The gradients of attention's keys and values."""


def attention(table: _Table, chip: str, itemsize: int, width: int) -> dict[str, int]:
    """Return the constants of one of attention's kernels for heads of `width` features."""
    lines = for_chip(table, chip)
    fitting = min(limit for size, limit in lines if size == itemsize and width <= limit)
    queries, keys, warps, stages = lines[itemsize, fitting]
    return {
        "BM": queries,
        "BN": keys,
        "BD": max(power_of_two(width), 16),
        "num_warps": warps,
        "num_stages": stages,
    }


def tile(itemsize: int, rows: int) -> dict[str, int]:
    """Return the constants of a product of matrices with `rows` rows on the left."""
    size = 64 if itemsize == 2 else 32
    return {
        "BM": min(max(power_of_two(rows), 16), size),
        "BN": 2 * size,
        "BK": size // 2,
        "num_warps": 4 if itemsize == 2 else 8,
        "num_stages": 3,
    }


def rotary(half: int, heads: int, rest: int) -> dict[str, int]:
    """Return the constants of a rotary embedding.

    Args:
        half: pairs that are turned.
        heads: of q or k, whichever has more.
        rest: features that pass through.
    """
    block = power_of_two(half)
    return {
        "HEADS": min(max(1024 // block, 1), power_of_two(heads)),
        "HALF": block,
        "REST": power_of_two(rest) if rest else 0,
        "num_warps": 4,
    }


def decoding(itemsize: int, width: int, group: int) -> dict[str, int]:
    """Return the constants of decode attention.

    Args:
        itemsize: bytes of an element.
        width: features of a head.
        group: query heads that share a key head.
    """
    return {
        "GROUP": max(power_of_two(group), 16),
        "BN": 64 if itemsize == 2 else 32,
        "BD": max(power_of_two(width), 16),
        "num_warps": 4,
        "num_stages": 2,
    }
