"""The `mixed_precision` and `float8` settings. Needs no torch."""

from typing import Any, Literal, get_args

from ms_parallel.errors import ConfigError
from ms_parallel.settings import short_repr

MixedPrecision = bool | Literal["float16"]
"""Compute in float32 (False), bfloat16 (True) or float16.

Weights, optimizer state and reductions are always float32."""
Float8 = Literal["none", "rowwise", "blockwise", "mxfp8"]
"""How the factors of matrix products are scaled before they are rounded to float8:

- `rowwise`: one scale per row, a power of two, as in torchao's recipe `rowwise`.
- `blockwise`: one scale per 128 elements of a row, and per 128 x 128 block of a weight
  (DeepSeek-V3, arXiv 2412.19437, section 3.3).
- `mxfp8`: one power of two per 32 elements of a row (OCP Microscaling Formats 1.0).
"""
FLOAT8 = get_args(Float8)
NAMES = {"bfloat16": True, "float16": "float16"}


def mixed_precision(value: Any) -> MixedPrecision:
    """Parse a flag or a dtype name.

    Raises:
        ConfigError: it is neither, or the name is unknown.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value not in NAMES:
        names = " or ".join(map(repr, NAMES))
        raise ConfigError(
            f"mixed_precision must be true (bfloat16), false, {names}, got {short_repr(value)}"
        )
    return NAMES[value]  # type: ignore[return-value]


def precision_name(choice: MixedPrecision) -> str:
    """Return the name of the compute dtype."""
    return choice if isinstance(choice, str) else "bfloat16" if choice else "float32"
