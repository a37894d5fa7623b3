"""Entries of an ahead-of-time compiled GPU library: kernels with their types, sizes and limits.

Tile counts and limits are expressions that are valid in both Python and C, so each is written once.
Names in them are the kernel's arguments and constants, or `extra` arguments of the launch.

The type of a kernel argument follows from its name unless its entry overrides it:

1. CAPITALS are a pointer to elements of the call's dtype; other names are integers.
2. Strides over a sequence, page or matrix, ``count`` and ``ignore_index`` are 64-bit, others
   32-bit.
3. Strides, widths, ``classes``, ``half``, ``group_size`` and ``count`` are multiples of 16, so that
   loads can be vectorized.
4. Divisors (`DIVISORS`) are at least 1.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Dtypes by their Triton names."""

DIVISORS = frozenset({"classes", "choices", "group", "group_size", "groups", "heads", "page"})
DIVISORS |= {"parts", "positions", "rows_per_part", "value_width", "width"}
"""Sizes that a kernel divides by, which must not be 0."""

_WIDE = re.compile(r"(batch|page|expert)_stride$|^(document|table)_stride$|^count$|^ignore_index$")
_ALIGNED = re.compile(r"stride$|^(width|value_width|out_width|classes|half|group_size|count)$")


@frozen(kw_only=True)
class Entry:
    """One compiled kernel of a library."""

    name: str
    """Unique name in the library: kernel, dtype and size."""
    operator: str
    """Name of the operator."""
    kernel: str
    """Fully qualified name of the Triton function, ``"MODULE.FUNCTION"``."""
    dtype: str
    """Key of `DTYPES`."""
    constants: Mapping[str, Any]
    """Compile-time constants, without Triton's own options."""
    warps: int
    """Triton's num_warps."""
    stages: int
    """Triton's num_stages."""
    tiles: str
    """Expression for the number of programs in a launch."""
    limits: Mapping[str, str] = field(factory=dict)
    """Maximum value per argument: a number or the name of a constant."""
    extra: tuple[str, ...] = ()
    """Launch arguments that are not passed to the kernel."""
    types: Mapping[str, str] = field(factory=dict)
    """Argument types that differ from the naming rules."""

    def signature(self, arguments: tuple[str, ...]) -> dict[str, str]:
        """Return the type of each kernel argument, in order."""
        return {name: self._type(name) for name in arguments}

    def _type(self, name: str) -> str:
        if name in self.constants:
            return "constexpr"
        if name in self.types:
            return self.types[name]
        if name.isupper():
            return f"*{self.dtype}"
        return "i64" if _WIDE.search(name) else "i32"

    def argument_limits(self) -> dict[str, int]:
        """Return the maximum of each argument whose limit is a number or a constant."""
        limits = {name: self.constants.get(limit, limit) for name, limit in self.limits.items()}
        return {name: int(limit) for name, limit in limits.items() if str(limit).isdecimal()}

    def aligned(self, name: str) -> bool:
        """Whether an argument is a multiple of 16: a pointer's address, or an integer's value."""
        ctype = self._type(name)
        return ctype.startswith("*") or (ctype[0] == "i" and bool(_ALIGNED.search(name)))


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
    **fields: Any,
) -> Entry:
    """Build an `Entry`.

    Args:
        operator: name of the operator.
        kernel: fully qualified name of the Triton function, ``"MODULE.FUNCTION"``.
        dtype: key of `DTYPES`.
        detail: suffix that distinguishes entries of the same kernel and dtype.
        constants: compile-time constants and Triton's options.
        tiles: expression for the number of programs in a launch.
        fp32: names of float32 arguments; names in capitals are pointers.
        i32: names of 32-bit integer arguments and pointers.
        i64: names of 64-bit integer arguments and pointers.
        **fields: other fields of `Entry`.
    """
    names_by_type = {"fp32": fp32, "i32": i32, "i64": i64}
    function = kernel.rpartition(".")[2]
    return Entry(
        name="_".join(str(part) for part in (function, dtype, detail) if part),
        operator=operator,
        kernel=kernel,
        dtype=dtype,
        # num_warps and num_stages are separate fields.
        constants={name: value for name, value in constants.items() if name[:4] != "num_"},
        warps=constants.get("num_warps", 4),
        stages=constants.get("num_stages", 1),
        tiles=tiles,
        types={
            name: "*" * name.isupper() + ctype
            for ctype, names in names_by_type.items()
            for name in names.split()
        },
        **fields,
    )
