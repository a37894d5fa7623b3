"""What a library holds: each kernel with the types, sizes and limits that it is compiled for.

Sums of tiles and limits are written once, in an expression that Python and C read alike. Names in
it are the kernel's arguments and constants, or `extra` arguments that the launch alone needs.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from attrs import field, frozen

from ms_kernels.triton import configuration
from ms_kernels.triton.configuration import Place

__all__ = ["DTYPES", "Entry", "entries"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the names that Triton has for them."""

_POINTERS = {
    **dict.fromkeys(
        ("SCALE", "MEAN", "DW", "DB", "COS", "SIN", "LOSSES", "TOTALS", "SLOPES", "FACTOR"),
        "*fp32",
    ),
    **dict.fromkeys(
        ("LSE", "DELTA", "PART", "TOP", "NORM", "CHOSEN", "ENTROPY", "PULL", "SPREAD_PULL"),
        "*fp32",
    ),
    **dict.fromkeys(("TARGETS", "TOKENS", "ORDER", "PLACES"), "*i64"),
    **dict.fromkeys(("DOCUMENT", "RANGES", "TABLE", "LENGTHS", "ENDS"), "*i32"),
    "PACKED": "*u8",
}
"""Types of pointers that do not follow the dtype of the call."""

_FLOATS = frozenset(["coldness", "eps", "factor", "keep", "mean_share", "rate", "root_scale"])
_FLOATS |= {"scale", "smoothing", "square_share", "z_loss"}
_WIDE = re.compile(r"(batch|page|expert)_stride$|^(document|table)_stride$|^count$|^ignore_index$")
"""Arguments of 64 bits: strides that pass over a whole sequence, page or matrix."""

_ALIGNED = re.compile(r"stride$|^(width|out_width|classes|half|group_size|count)$")
"""Whole numbers that are multiples of 16, so that loads may be vectors."""


@frozen(kw_only=True)
class Entry:
    """One compiled kernel of a library."""

    name: str
    """Unique in a library: kernel, dtype and size."""
    kernel: str
    """``"MODULE.FUNCTION"`` in `ms_kernels.triton.kernels`."""
    dtype: str
    """As in `DTYPES`."""
    constants: Mapping[str, Any]
    """Compile-time constants, without Triton's options."""
    warps: int
    stages: int
    tiles: str
    """How many programs a launch takes."""
    limits: Mapping[str, str] = field(factory=dict)
    """What an argument may be at most, by name."""
    extra: tuple[str, ...] = ()
    """Arguments of the launch that the kernel does not take."""
    types: Mapping[str, str] = field(factory=dict)
    """Types that differ from the usual."""

    def signature(self, arguments: tuple[str, ...]) -> dict[str, str]:
        """Return the type of each of the kernel's arguments, in order."""
        return {name: self._type(name) for name in arguments}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.types:
            return self.types[name]
        if name.isupper():
            return _POINTERS.get(name, f"*{self.dtype}")
        if name in _FLOATS:
            return "fp32"
        return "i64" if _WIDE.search(name) else "i32"

    def greatest(self) -> dict[str, int]:
        """Return what arguments may be at most, where a constant says so."""
        named = {name: self.constants.get(most, most) for name, most in self.limits.items()}
        return {name: int(most) for name, most in named.items() if str(most).isdecimal()}

    def aligned(self, name: str) -> bool:
        """Whether an argument is a multiple of 16: bytes of a pointer, or a whole number."""
        kind = self._type(name)
        return kind.startswith("*") or (kind[0] == "i" and bool(_ALIGNED.search(name)))


def entries(chip: str) -> tuple[Entry, ...]:
    """Return what a library for `chip` holds."""
    found: list[Entry] = []
    for dtype in DTYPES:
        for part in (
            _norms,
            _elements,
            _turns,
            _losses,
            _attention,
            _decoding,
            _experts,
            _quantized,
        ):
            found += part(chip, dtype)
    return tuple(found)


def _entry(
    kernel: str, dtype: str, detail: object, constants: Mapping[str, Any], tiles: str, **more: Any
) -> Entry:
    own = {name: value for name, value in constants.items() if name[:4] != "num_"}
    return Entry(
        name="_".join(str(each) for each in (kernel.partition(".")[2], dtype, detail) if each),
        kernel=kernel,
        dtype=dtype,
        constants=own,
        warps=constants.get("num_warps", 4),
        stages=constants.get("num_stages", 1),
        tiles=tiles,
        **more,
    )


def _norms(chip: str, dtype: str) -> Iterator[Entry]:
    """Rows that a program holds whole, for widths up to each of a few."""
    within, shares = {"width": "BLOCK"}, "cdiv(rows, rows_each)"
    place = Place(chip, DTYPES[dtype])
    for width in (128, 1024, 2048, 4096, 8192):
        for name, operator, detail, flags in (
            ("rms_norm", "rms_norm", f"{width}", {"ADD": False}),
            ("rms_norm", "add_rms_norm", f"add_{width}", {"ADD": True}),
            ("layer_norm", "layer_norm", f"{width}", {}),
        ):
            for which, tiles in (("forward", "cdiv(rows, ROWS)"), ("backward", shares)):
                kernel = f"{name}_{which}"
                rows = configuration.whole_rows(operator, kernel, place, width)
                bias = {"BIAS": True} if kernel == "layer_norm_forward" else {}
                constants = {**rows, **flags, **bias}
                yield _entry(f"{name}.{kernel}", dtype, detail, constants, tiles, limits=within)


def _elements(chip: str, dtype: str) -> Iterator[Entry]:
    """What works by elements: rows of any width."""
    tiles, place = "cdiv(rows, ROWS) * cdiv(width, BLOCK)", Place(chip, DTYPES[dtype])
    for activation in ("silu", "gelu", "gelu_tanh"):
        for kernel in ("gated_forward", "gated_backward"):
            operator = "swiglu" if activation == "silu" else "geglu"
            blocks = configuration.elements(operator, kernel, place, 4096)
            constants = {**blocks, "ACTIVATION": activation}
            yield _entry(f"gated.{kernel}", dtype, activation, constants, tiles)
    step = configuration.fixed("adamw_step", "adamw_step", place)
    moments = {"MEAN": "*fp32", "SQUARE": "*fp32"}
    yield _entry("adamw_step.adamw_step", dtype, "", step, "cdiv(count, BLOCK)", types=moments)
    cast = configuration.fixed("linear_cross_entropy", "scale_cast", place)
    wide = {"X": "*fp32"}
    yield _entry("cross_entropy.scale_cast", dtype, "", cast, "cdiv(count, BLOCK)", types=wide)


def _turns(chip: str, dtype: str) -> Iterator[Entry]:
    """Rotary embeddings of heads of 64 and 128 features, both ways."""
    tiles = "batch * positions * (cdiv(q_heads, HEADS) + cdiv(k_heads, HEADS))"
    for half, interleaved, back in product((32, 64), (False, True), (False, True)):
        blocks = configuration.rotary(Place(chip, DTYPES[dtype]), half, 32, 0)
        yield _entry(
            "rotary.rotary_turn",
            dtype,
            f"{2 * half}{'_interleaved' * interleaved}{'_back' * back}",
            {**blocks, "INTERLEAVED": interleaved, "BACK": back},
            tiles,
            limits={"half": "HALF", "width": "2 * half"},
            extra=("batch",),
        )


def _losses(chip: str, dtype: str) -> Iterator[Entry]:
    """What walks along rows of logits: any number of classes."""
    across, wide = "rows * cdiv(classes, BLOCK)", {"LOGITS": "*fp32"}
    made: tuple[tuple[str, str, str, dict[str, Any], str, dict[str, str]], ...] = (
        ("cross_entropy", "cross_entropy_forward", "", {"DIFFERENTIATE": False}, "rows", {}),
        (
            "linear_cross_entropy",
            "cross_entropy_forward",
            "gradient",
            {"DIFFERENTIATE": True},
            "rows",
            wide,
        ),
        ("cross_entropy", "cross_entropy_backward", "", {}, across, {}),
        ("token_log_probs", "chosen_forward", "", {}, "rows", wide),
        ("token_log_probs", "chosen_backward", "", {}, across, wide),
    )
    for operator, kernel, detail, flags, tiles, types in made:
        place = Place(chip, DTYPES[dtype])
        walk = configuration.row_blocks(operator, kernel, place, V=2**20)
        module = "token_log_probs" if operator == "token_log_probs" else "cross_entropy"
        more: dict[str, Any] = {"extra": ("rows",), "types": types}
        yield _entry(f"{module}.{kernel}", dtype, detail, {**walk, **flags}, tiles, **more)


def _attention(chip: str, dtype: str) -> Iterator[Entry]:
    """Heads of 64 and 128 features, plain and with all masks."""
    place = Place(chip, DTYPES[dtype])
    queries = "batch * heads * cdiv(queries, BM)"
    for width in (64, 128):
        common: dict[str, Any] = {"limits": {"width": "BD"}, "extra": ("batch",)}
        for detail, causal, hidden in (("causal", True, False), ("masked", True, True)):
            masks = {"CAUSAL": causal, "WINDOW": hidden, "DOCUMENTS": hidden}
            for kernel, tiles in (
                ("attention_forward", queries),
                ("attention_backward_queries", queries),
                ("attention_backward_keys", "batch * (heads / group) * cdiv(keys, BN)"),
            ):
                constants = configuration.attention(kernel, place, width)
                yield _entry(
                    f"attention.{kernel}",
                    dtype,
                    f"{width}_{detail}",
                    {**constants, **masks},
                    tiles,
                    **common,
                )
        block = configuration.attention("attention_backward_queries", place, width)
        yield _entry(
            "attention.attention_delta",
            dtype,
            width,
            {"BM": block["BM"], "BD": block["BD"]},
            queries,
            **common,
        )


def _decoding(chip: str, dtype: str) -> Iterator[Entry]:
    """One query a sequence, up to 16 query heads of a group."""
    for width in (64, 128):
        constants, _ = configuration.decoding(Place(chip, DTYPES[dtype]), width, 16)
        for windowed in (False, True):
            yield _entry(
                "decode_attention.decode_parts",
                dtype,
                f"{width}{'_window' * windowed}",
                {**constants, "WINDOW": windowed},
                "batch * (heads / group) * parts",
                limits={"width": "BD", "group": "GROUP"},
                extra=("batch",),
            )
        yield _entry(
            "decode_attention.decode_join",
            dtype,
            width,
            {"PARTS": 64, "BD": width},
            "batch * heads",
            limits={"width": "BD", "parts": "PARTS"},
            extra=("batch", "heads"),
        )


def _experts(chip: str, dtype: str) -> Iterator[Entry]:
    """Rows to experts, their products, and back; up to 128 experts."""
    place, across = Place(chip, DTYPES[dtype]), "cdiv(width, BLOCK)"

    def walk(operator: str, kernel: str) -> dict[str, int]:
        return configuration.row_blocks(operator, kernel, place, H=4096)

    gather = walk("permute_tokens", "gather_rows")
    yield _entry("experts.gather_rows", dtype, "", gather, f"rows * {across}")
    for weighted in (False, True):
        for kernel, tiles in (
            ("sum_choices", f"tokens * {across}"),
            ("spread_choice", "tokens * choices"),
        ):
            constants = {**walk("unpermute_tokens", kernel), "WEIGHTED": weighted}
            detail, more = "weighted" * weighted, {"extra": ("tokens",), "types": {"W": "*fp32"}}
            yield _entry(f"experts.{kernel}", dtype, detail, constants, tiles, **more)
    widths = {"width": "65536", "out_width": "65536"}
    yield _entry(
        "experts.grouped_rows",
        dtype,
        "",
        {**configuration.fixed("grouped_matmul", "grouped_rows", place), "EXPERTS": 128},
        "(cdiv(rows, BM) + experts) * cdiv(out_width, BN)",
        limits={"experts": "EXPERTS", **widths},
    )
    yield _entry(
        "experts.grouped_weights",
        dtype,
        "",
        configuration.fixed("grouped_matmul", "grouped_weights", place),
        "experts * cdiv(width, BK) * cdiv(out_width, BN)",
        limits=widths,
        extra=("experts",),
        types={"DW": f"*{dtype}"},
    )


def _quantized(chip: str, dtype: str) -> Iterator[Entry]:
    """Packed weights of 4 and 8 bits, for one row and for many, with zeros and without."""
    scales, place = {"SCALES": "*fp32", "ZEROS": "*fp32"}, Place(chip, DTYPES[dtype])
    for bits in (4, 8):
        for zeroed in (False, True):
            flags = {"BITS": bits, "ZEROED": zeroed}
            for rows, told in ((16, "few"), (2**20, "many")):
                for kernel, tiles in (
                    ("quantized_forward", "cdiv(rows, BM) * cdiv(out_width, BN)"),
                    ("quantized_backward", "cdiv(rows, BM) * cdiv(width, BK)"),
                ):
                    tile = configuration.tile("quantized_linear", kernel, place, rows)
                    detail, constants = f"{bits}{'_zeros' * zeroed}_{told}", {**tile, **flags}
                    name = f"quantized_linear.{kernel}"
                    yield _entry(name, dtype, detail, constants, tiles, types=scales)
