"""Entries of a GPU's library: kernels with the types, sizes and limits they are compiled for.

Numbers of tiles and limits are written once, in an expression that Python and C read alike. Names
in it are the kernel's arguments and constants, or `extra` arguments that the launch alone needs.

What the name of a kernel's argument says, where its entry does not say otherwise:

1. CAPITALS are a pointer to elements of the call's dtype; other names are whole numbers.
2. Strides over a whole sequence, page or matrix, ``count`` and ``ignore_index`` have 64 bits,
   others 32.
3. Strides, widths, ``classes``, ``half``, ``group_size`` and ``count`` are multiples of 16, so that
   loads may be vectors.
4. What a kernel divides by (`DIVISORS`) is at least 1.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the names that Triton has for them."""

DIVISORS = frozenset({"classes", "choices", "group", "group_size", "groups", "heads", "page"})
DIVISORS |= {"parts", "positions", "rows_each", "value_width", "width"}
"""Sizes that may not be 0."""

_WIDE = re.compile(r"(batch|page|expert)_stride$|^(document|table)_stride$|^count$|^ignore_index$")
_ALIGNED = re.compile(r"stride$|^(width|value_width|out_width|classes|half|group_size|count)$")


@frozen(kw_only=True)
class Entry:
    """One compiled kernel of a library."""

    name: str
    """Unique in a library: kernel, dtype and size."""
    operator: str
    """Name of the operator that it belongs to."""
    kernel: str
    """Where the Triton function stands: ``"MODULE.FUNCTION"``, the module's whole name."""
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
    """Types that differ from what a name says."""

    def signature(self, arguments: tuple[str, ...]) -> dict[str, str]:
        """Return the type of each of the kernel's arguments, in order."""
        return {name: self._type(name) for name in arguments}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.types:
            return self.types[name]
        if name.isupper():
            return f"*{self.dtype}"
        return "i64" if _WIDE.search(name) else "i32"

    def greatest(self) -> dict[str, int]:
        """Return what arguments may be at most, where a constant says so."""
        named = {name: self.constants.get(most, most) for name, most in self.limits.items()}
        return {name: int(most) for name, most in named.items() if str(most).isdecimal()}

    def aligned(self, name: str) -> bool:
        """Return whether an argument is a multiple of 16: bytes of a pointer, or a whole number."""
        kind = self._type(name)
        return kind.startswith("*") or (kind[0] == "i" and bool(_ALIGNED.search(name)))


def entry(
    operator: str,
    kernel: str,
    dtype: str,
    detail: object,
    constants: Mapping[str, Any],
    tiles: str,
    *,
    fp32: str = "",
    i32: str = "",
    i64: str = "",
    u8: str = "",
    **more: Any,
) -> Entry:
    """Return an entry.

    Args:
        operator: name of the operator that it belongs to.
        kernel: where the Triton function stands, ``"MODULE.FUNCTION"``.
        dtype: as in `DTYPES`.
        detail: what tells it from other entries of the kernel and dtype.
        constants: compile-time constants, and Triton's options.
        tiles: how many programs a launch takes.
        fp32: names of numbers of that type, and in capitals of pointers to it.
        i32: likewise.
        i64: likewise.
        u8: likewise.
        **more: fields of `Entry`.
    """
    kinds = {"fp32": fp32, "i32": i32, "i64": i64, "u8": u8}
    return Entry(
        name="_".join(str(each) for each in (kernel.rpartition(".")[2], dtype, detail) if each),
        operator=operator,
        kernel=kernel,
        dtype=dtype,
        constants={name: value for name, value in constants.items() if name[:4] != "num_"},
        warps=constants.get("num_warps", 4),
        stages=constants.get("num_stages", 1),
        tiles=tiles,
        types={
            name: "*" * name.isupper() + kind
            for kind, names in kinds.items()
            for name in names.split()
        },
        **more,
    )
