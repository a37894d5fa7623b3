"""What a model may compute in, as settings name it; without torch."""

from typing import Any, Literal

from ms_parallel.errors import ConfigError
from ms_parallel.settings import short_repr

MixedPrecision = bool | Literal["float16"]
"""False computes in float32, True in bfloat16; weights, moments and sums are float32 in all."""
NAMES = {"bfloat16": True, "float16": "float16"}


def mixed_precision(value: Any) -> MixedPrecision:
    """Return the choice that a flag or a name stands for.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value not in NAMES:
        names = " or ".join(map(repr, NAMES))
        raise ConfigError(
            f"mixed_precision is {short_repr(value)}; give true (bfloat16), false, {names}"
        )
    return NAMES[value]  # type: ignore[return-value]


def precision_name(choice: MixedPrecision) -> str:
    """Return the name of the precision that is computed in."""
    return choice if isinstance(choice, str) else "bfloat16" if choice else "float32"
