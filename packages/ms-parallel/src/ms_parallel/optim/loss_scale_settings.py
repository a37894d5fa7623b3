"""Settings of the loss scale. Needs no torch."""

import math
from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field, fields, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import integer, nearest, short_repr

MIN_SCALE = 1.0
"""Lowest scale: a loss that overflows unscaled cannot be rescued."""


def _power_of_two(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not MIN_SCALE <= value <= 2.0**40 or math.frexp(value)[0] != 0.5:  # type: ignore[operator,arg-type]
        raise ConfigError(
            f"{attribute.name} must be a power of two from 1 to 2**40, so that scaling is exact,"
            f" got {short_repr(value)}"
        )


@frozen(kw_only=True)
class LossScale:
    """Initial value and adjustment of the loss scale.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    initial: float = field(default=2.0**16, validator=_power_of_two)
    """Initial scale, a power of two."""
    growth_interval: int = field(default=2000, validator=integer())
    """Double the scale after this many consecutive steps without overflow."""
    hysteresis: int = field(default=1, validator=integer())
    """Halve the scale after this many overflows since it last changed; each skips its step."""


def loss_scale_of(value: "LossScale | Mapping[str, Any] | None") -> "LossScale | None":
    """Build the settings from a table; None stays None.

    Raises:
        ConfigError: the value is not a table, or a setting is unknown or out of range.
    """
    if value is None or isinstance(value, LossScale):
        return value
    keys = [f.name for f in fields(LossScale)]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"loss_scale must be a table of {', '.join(keys)}, such as {{initial = 65536}}, got"
            f" {short_repr(value)}"
        )
    for key in value:
        if key not in keys:
            raise ConfigError(
                f"loss_scale has unknown setting {short_repr(key)}; {nearest(str(key), keys)}"
            )
    return LossScale(**value)


def check_loss_scale(settings: LossScale | None, mixed_precision: object) -> None:
    """Check that loss scaling is used only with float16 gradients.

    Raises:
        ConfigError: loss scaling is set, and gradients are not float16.
    """
    if settings is not None and mixed_precision != "float16":
        raise ConfigError(
            "loss_scale is only used with float16 gradients; set mixed_precision='float16', or"
            " remove loss_scale"
        )
