"""The `mixed_precision` setting. Needs no torch."""

from typing import Any, Literal

from ms_parallel.errors import ConfigError
from ms_parallel.settings import short_repr

MixedPrecision = bool | Literal["float16"]
"""Compute in float32 (False), bfloat16 (True) or float16.

Weights, optimizer state and reductions are always float32."""
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
