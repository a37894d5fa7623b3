"""What a library holds: each kernel with the types, sizes and limits that it is compiled for.

Sums of tiles and limits are written once, in an expression that Python and C read alike. Names in
it are the kernel's arguments and constants, or `extra` arguments that the launch alone needs.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import field, frozen

from ms_kernels.triton import configuration

__all__ = ["DTYPES", "Entry", "entries"]

DTYPES = {"bf16": ("*bf16", 2), "fp16": ("*fp16", 2), "fp32": ("*fp32", 4)}
"""Triton's type of a pointer and bytes of an element, by the name of a dtype."""

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
            return _POINTERS.get(name, DTYPES[self.dtype][0])
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
        for part in (_norms, _rows, _attention, _decoding, _experts, _quantized):
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
    within = {"width": "BLOCK"}
    for width in (128, 1024, 2048, 4096, 8192):
        rows = configuration.whole_rows(width)
        for add in (False, True):
            name, detail = "rms_norm.rms_norm", f"add_{width}" if add else width
            each = {**rows, "ADD": add}
            yield _entry(f"{name}_forward", dtype, detail, each, "cdiv(rows, ROWS)", limits=within)
            yield _entry(
                f"{name}_backward", dtype, detail, each, "cdiv(rows, rows_each)", limits=within
            )
        name = "layer_norm.layer_norm"
        yield _entry(
            f"{name}_forward",
            dtype,
            width,
            {**rows, "BIAS": True},
            "cdiv(rows, ROWS)",
            limits=within,
        )
        yield _entry(f"{name}_backward", dtype, width, rows, "cdiv(rows, rows_each)", limits=within)


def _rows(chip: str, dtype: str) -> Iterator[Entry]:
    """What works by elements or walks along rows: any width."""
    tiles = "cdiv(rows, ROWS) * cdiv(width, BLOCK)"
    for activation in ("silu", "gelu", "gelu_tanh"):
        constants = {**configuration.elements(4096), "ACTIVATION": activation}
        yield _entry("gated.gated_forward", dtype, activation, constants, tiles)
        yield _entry("gated.gated_backward", dtype, activation, constants, tiles)
    for half in (32, 64):
        for interleaved in (False, True):
            for back in (False, True):
                constants = {
                    **configuration.rotary(half, 32, 0),
                    "INTERLEAVED": interleaved,
                    "BACK": back,
                }
                detail = f"{2 * half}{'_interleaved' * interleaved}{'_back' * back}"
                yield _entry(
                    "rotary.rotary_turn",
                    dtype,
                    detail,
                    constants,
                    "batch * positions * (cdiv(q_heads, HEADS) + cdiv(k_heads, HEADS))",
                    limits={"half": "HALF", "width": "2 * half"},
                    extra=("batch",),
                )
    walk = configuration.row_blocks(2**20)
    yield _entry(
        "cross_entropy.cross_entropy_forward",
        dtype,
        "",
        {**walk, "DIFFERENTIATE": False},
        "rows",
        extra=("rows",),
    )
    yield _entry(
        "cross_entropy.cross_entropy_forward",
        dtype,
        "gradient",
        {**walk, "DIFFERENTIATE": True},
        "rows",
        extra=("rows",),
        types={"LOGITS": "*fp32"},
    )
    across = "rows * cdiv(classes, BLOCK)"
    yield _entry("cross_entropy.cross_entropy_backward", dtype, "", walk, across, extra=("rows",))
    yield _entry(
        "cross_entropy.scale_cast",
        dtype,
        "",
        {"BLOCK": 2048},
        "cdiv(count, BLOCK)",
        types={"X": "*fp32"},
    )
    wide = {"LOGITS": "*fp32"}
    yield _entry(
        "token_log_probs.chosen_forward", dtype, "", walk, "rows", extra=("rows",), types=wide
    )
    yield _entry(
        "token_log_probs.chosen_backward", dtype, "", walk, across, extra=("rows",), types=wide
    )
    yield _entry(
        "adamw_step.adamw_step",
        dtype,
        "",
        {"BLOCK": 1024},
        "cdiv(count, BLOCK)",
        types={"MEAN": "*fp32", "SQUARE": "*fp32"},
    )


def _attention(chip: str, dtype: str) -> Iterator[Entry]:
    """Heads of 64 and 128 features, plain and with all masks."""
    itemsize = DTYPES[dtype][1]
    queries = "batch * heads * cdiv(queries, BM)"
    for width in (64, 128):
        common: dict[str, Any] = {"limits": {"width": "BD"}, "extra": ("batch",)}
        for detail, causal, hidden in (("causal", True, False), ("masked", True, True)):
            masks = {"CAUSAL": causal, "WINDOW": hidden, "DOCUMENTS": hidden}
            for kernel, table, tiles in (
                ("forward", configuration.FORWARD, queries),
                ("backward_queries", configuration.BACKWARD_QUERIES, queries),
                (
                    "backward_keys",
                    configuration.BACKWARD_KEYS,
                    "batch * (heads / group) * cdiv(keys, BN)",
                ),
            ):
                constants = configuration.attention(table, chip, itemsize, width)
                yield _entry(
                    f"attention.attention_{kernel}",
                    dtype,
                    f"{width}_{detail}",
                    {**constants, **masks},
                    tiles,
                    **common,
                )
        block = configuration.attention(configuration.BACKWARD_QUERIES, chip, itemsize, width)
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
        constants = {**configuration.decoding(DTYPES[dtype][1], width, 16), "WINDOW": False}
        yield _entry(
            "decode_attention.decode_parts",
            dtype,
            width,
            constants,
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
    walk = configuration.row_blocks(4096)
    across = "cdiv(width, BLOCK)"
    yield _entry("experts.gather_rows", dtype, "", walk, f"rows * {across}")
    weights = {"W": "*fp32"}
    for weighted in (False, True):
        each: dict[str, Any] = {"extra": ("tokens",), "types": weights}
        detail, constants = "weighted" * weighted, {**walk, "WEIGHTED": weighted}
        yield _entry("experts.sum_choices", dtype, detail, constants, f"tokens * {across}", **each)
        yield _entry("experts.spread_choice", dtype, detail, constants, "tokens * choices", **each)
    tile = configuration.tile(DTYPES[dtype][1], 2**20)
    widths = {"width": "65536", "out_width": "65536"}
    yield _entry(
        "experts.grouped_rows",
        dtype,
        "",
        {**tile, "EXPERTS": 128},
        "(cdiv(rows, BM) + experts) * cdiv(out_width, BN)",
        limits={"experts": "EXPERTS", **widths},
    )
    yield _entry(
        "experts.grouped_weights",
        dtype,
        "",
        {**tile, "BM": tile["BK"], "BK": tile["BM"]},
        "experts * cdiv(width, BK) * cdiv(out_width, BN)",
        limits=widths,
        extra=("experts",),
        types={"DW": DTYPES[dtype][0]},
    )


def _quantized(chip: str, dtype: str) -> Iterator[Entry]:
    """Packed weights of 4 and 8 bits, for one row and for many, with zeros and without."""
    scales = {"SCALES": "*fp32", "ZEROS": "*fp32"}
    for bits in (4, 8):
        for zeroed in (False, True):
            flags = {"BITS": bits, "ZEROED": zeroed}
            for rows, told in ((16, "few"), (2**20, "many")):
                yield _entry(
                    "quantized_linear.quantized_forward",
                    dtype,
                    f"{bits}{'_zeros' * zeroed}_{told}",
                    {**configuration.tile(DTYPES[dtype][1], rows), **flags},
                    "cdiv(rows, BM) * cdiv(out_width, BN)",
                    types=scales,
                )
