"""Block sizes, warps and stages of each kernel: what the tuning tables say, made to fit a call.

The tables (``ms_kernels/tables``) hold what a tuner may choose. Here stands which of these each
kernel has, what a tuner tries, and what follows from a call's sizes: a block that holds a whole
row, or that is no larger than what there is. Nothing is measured in a run.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ms_kernels import tuning
from ms_kernels.registry import Tuned
from ms_kernels.triton.launching import blocks, power_of_two

__all__ = [
    "TUNED",
    "VERSIONS",
    "Place",
    "attention",
    "decoding",
    "elements",
    "fixed",
    "place_of",
    "rotary",
    "row_blocks",
    "shares",
    "tile",
    "whole_rows",
]

VERSIONS: Mapping[str, int] = MappingProxyType({})
"""Versions of operators' kernels, by operator, where above 1."""


class Place(NamedTuple):
    """Where a kernel runs, as tables are keyed."""

    chip: str
    dtype: torch.dtype
    """Of the operator's first argument."""


def place_of(tensor: Tensor) -> Place:
    """Return where the operator runs whose first argument is `tensor`."""
    return Place(tuning.chip_of(tensor.device), tensor.dtype)


def fixed(operator: str, kernel: str, place: Place, **sizes: int) -> dict[str, int]:
    """Return the parameters of a kernel as its table has them.

    Args:
        operator: which the kernel runs for.
        kernel: such as ``"rms_norm_forward"``.
        place: chip and dtype.
        **sizes: what tables may tell apart, as `TUNED` says; ``rows`` stands for ``"..."`` and
            ``half`` for ``"R/2"``.

    Raises:
        TableError: when no table knows the kernel.
    """
    found = tuning.configuration(
        operator,
        "triton",
        kernel,
        version=VERSIONS.get(operator, 1),
        chip=place.chip,
        dtype=place.dtype,
        sizes={_SYMBOLS.get(name, name): size for name, size in sizes.items()},
    )
    return dict(found)


_SYMBOLS = {"rows": "...", "half": "R/2"}


def whole_rows(operator: str, kernel: str, place: Place, width: int) -> dict[str, int]:
    """Return the constants of a kernel that holds whole rows of `width` elements."""
    values, block = fixed(operator, kernel, place, H=width), power_of_two(width)
    rows = max(values["ELEMENTS"] // block, 1)
    return {"ROWS": rows, "BLOCK": block, "num_warps": values["num_warps"]}


def shares(operator: str, kernel: str, place: Place, rows: int, width: int) -> tuple[int, int]:
    """Return rows a program, and programs, of a normalisation's backward pass.

    Each program keeps its own sum of the weight's gradient, so that their number belongs to the
    result; a program's share is a multiple of the rows that it holds at once.
    """
    at_once = whole_rows(operator, kernel, place, width)["ROWS"]
    most = fixed(operator, kernel, place, H=width)["PROGRAMS"]
    each = max(blocks(blocks(rows, at_once), most) * at_once, at_once)
    return each, blocks(rows, each)


def elements(operator: str, kernel: str, place: Place, width: int) -> dict[str, int]:
    """Return the constants of an element-wise kernel over rows of `width` elements."""
    values = fixed(operator, kernel, place, I=width)
    block = min(power_of_two(width), values["ELEMENTS"])
    return {
        "ROWS": values["ELEMENTS"] // block,
        "BLOCK": block,
        "num_warps": values["num_warps"],
    }


def row_blocks(operator: str, kernel: str, place: Place, **width: int) -> dict[str, int]:
    """Return the constants of a kernel that walks along a row; its width by its symbol."""
    values = fixed(operator, kernel, place, **width)
    (size,) = width.values()
    return {**values, "BLOCK": min(power_of_two(size), values["BLOCK"])}


def attention(kernel: str, place: Place, width: int) -> dict[str, int]:
    """Return the constants of one of attention's kernels for heads of `width` features."""
    values = fixed("attention", kernel, place, D=width)
    return {**values, "BD": max(power_of_two(width), 16)}


def tile(operator: str, kernel: str, place: Place, rows: int) -> dict[str, int]:
    """Return the constants of a product of matrices with `rows` rows on the left."""
    values = fixed(operator, kernel, place, rows=rows)
    return {**values, "BM": min(max(power_of_two(rows), 16), values["BM"])}


def rotary(place: Place, half: int, heads: int, rest: int) -> dict[str, int]:
    """Return the constants of a rotary embedding.

    Args:
        place: chip and dtype.
        half: pairs that are turned.
        heads: of q or k, whichever has more.
        rest: features that pass through.
    """
    values, block = fixed("rotary", "rotary_turn", place, half=half), power_of_two(half)
    return {
        "HEADS": min(max(values["ELEMENTS"] // block, 1), power_of_two(heads)),
        "HALF": block,
        "REST": power_of_two(rest) if rest else 0,
        "num_warps": values["num_warps"],
    }


def decoding(place: Place, width: int, group: int) -> tuple[dict[str, int], int]:
    """Return the constants of decode attention, and the positions of one part.

    Args:
        place: chip and dtype.
        width: features of a head.
        group: query heads that share a key head.
    """
    values = fixed("decode_attention", "decode_parts", place, D=width)
    positions = values.pop("POSITIONS")
    members, features = (max(power_of_two(each), 16) for each in (group, width))
    return {"GROUP": members, **values, "BD": features}, positions


def _grid(**values: Iterable[int]) -> tuple[Mapping[str, int], ...]:
    """Return every combination."""
    return tuple(dict(zip(values, each, strict=True)) for each in product(*values.values()))


_NORM = _grid(ELEMENTS=(1024, 2048, 4096), num_warps=(4, 8, 16))
_NORM_BACK = _grid(ELEMENTS=(1024, 2048, 4096), num_warps=(4, 8, 16), PROGRAMS=(132, 264, 528))
_NORM_SIZES = tuple({"...": 2**25 // width, "H": width} for width in (1024, 2048, 4096, 8192))
_GATED = _grid(ELEMENTS=(1024, 2048, 4096), num_warps=(4, 8))
_WALK = _grid(BLOCK=(1024, 2048, 4096, 8192), num_warps=(4, 8, 16))
_MASKED = _grid(BM=(64, 128), BN=(32, 64, 128), num_warps=(4, 8), num_stages=(2, 3))
_TILE = _grid(BM=(64, 128), BN=(64, 128), BK=(32, 64), num_warps=(4, 8), num_stages=(2, 3))
_TILE_BACK = _grid(BM=(32, 64), BN=(32, 128), BK=(64, 128), num_warps=(4, 8), num_stages=(2, 3))
_HEADS = tuple(
    {"B": 2, "Sq": 4096, "Sk": 4096, "Hq": 16, "Hk": 4, "D": width} for width in (64, 128)
)
_PAGED = tuple(
    {"B": 32, "Hq": 32, "Hk": 8, "D": width, "P": 8192, "page": 16, "N": 256} for width in (64, 128)
)
_PACKED = tuple(
    {"...": rows, "K": 4096, "P": 2048, "G": 128, "N": 14336} for rows in (16, 64, 2048)
)
_EXPERTS = ({"T": 16384, "E": 8, "K": 2048, "N": 7168},)
_TOKENS = ({"T": 16384, "C": 2, "H": 4096}, {"R": 32768, "T": 16384, "C": 2, "H": 4096})


def _norms(kernel: str) -> tuple[Tuned, ...]:
    return tuple(
        Tuned(kernel=f"{kernel}_{which}", sizes=("H",), tried_at=_NORM_SIZES, candidates=tried)
        for which, tried in (("forward", _NORM), ("backward", _NORM_BACK))
    )


def _some(
    kernels: str,
    sizes: str,
    tried_at: tuple[Mapping[str, int], ...],
    candidates: tuple[Mapping[str, int], ...],
) -> tuple[Tuned, ...]:
    return tuple(
        Tuned(kernel=kernel, sizes=tuple(sizes.split()), tried_at=tried_at, candidates=candidates)
        for kernel in kernels.split()
    )


_GATE_SIZES = ({"...": 8192, "I": 14336},)
_CLASSES = ({"...": 4096, "V": 32768}, {"...": 4096, "V": 128256})
_HIDDEN = tuple({**each, "H": 1024} for each in _CLASSES)
_SPREAD = _some("scale_cast", "", _HIDDEN[-1:], _grid(BLOCK=(1024, 2048, 4096), num_warps=(4, 8)))

TUNED: Mapping[str, tuple[Tuned, ...]] = MappingProxyType(
    {
        "rms_norm": _norms("rms_norm"),
        "add_rms_norm": _norms("rms_norm"),
        "layer_norm": _norms("layer_norm"),
        "rotary": _some(
            "rotary_turn",
            "R/2",
            ({"B": 4, "S": 4096, "Hq": 32, "Hk": 8, "D": 128, "R/2": 64},),
            _grid(ELEMENTS=(512, 1024, 2048), num_warps=(2, 4, 8)),
        ),
        "swiglu": _some("gated_forward gated_backward", "I", _GATE_SIZES, _GATED),
        "geglu": _some("gated_forward gated_backward", "I", _GATE_SIZES, _GATED),
        "attention": _some(
            "attention_forward attention_backward_queries attention_backward_keys",
            "D",
            _HEADS,
            _MASKED,
        ),
        "decode_attention": _some(
            "decode_parts",
            "D",
            _PAGED,
            _grid(BN=(32, 64, 128), POSITIONS=(256, 512), num_warps=(4, 8), num_stages=(2, 3)),
        ),
        "cross_entropy": _some(
            "cross_entropy_forward cross_entropy_backward", "V", _CLASSES, _WALK
        ),
        "linear_cross_entropy": (
            *_some("cross_entropy_forward cross_entropy_backward", "V", _HIDDEN, _WALK),
            *_SPREAD,
        ),
        "token_log_probs": (
            *_some("chosen_forward chosen_backward", "V", _HIDDEN, _WALK),
            *_SPREAD,
        ),
        "permute_tokens": _some("gather_rows sum_choices", "H", _TOKENS[:1], _WALK),
        "unpermute_tokens": _some("sum_choices spread_choice", "H", _TOKENS[1:], _WALK),
        "grouped_matmul": (
            *_some("grouped_rows", "", _EXPERTS, _TILE),
            *_some("grouped_weights", "", _EXPERTS, _TILE_BACK),
        ),
        "quantized_linear": (
            *_some("quantized_forward", "...", _PACKED, _TILE),
            *_some("quantized_backward", "...", _PACKED, _TILE_BACK),
        ),
        "adamw_step": _some(
            "adamw_step", "", ({"...": 2**26},), _grid(BLOCK=(1024, 2048, 4096), num_warps=(4, 8))
        ),
    }
)
"""Kernels of each operator, by operator, that tables tell apart by some sizes."""
