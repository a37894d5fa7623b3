"""Settings of updates, shared by engine and run file; imports no torch."""

import math
from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field, fields, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.settings import integer, nearest, short_repr

LEAST = 1.0
"""Lowest scale: a loss that overflows unscaled cannot be rescued."""


def _power_of_two(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not LEAST <= value <= 2.0**40 or math.frexp(value)[0] != 0.5:  # type: ignore[operator,arg-type]
        raise ConfigError(
            f"{attribute.name} is {short_repr(value)}; give a power of two from 1 to 2**40, by"
            " which gradients are multiplied and divided without an error"
        )


@frozen(kw_only=True)
class LossScale:
    """Initial value and adjustment of the loss scale.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    initial: float = field(default=2.0**16, validator=_power_of_two)
    """The scale to begin with, a power of two."""
    growth_interval: int = field(default=2000, validator=integer())
    """Updates in a row without an overflow after which it is doubled."""
    hysteresis: int = field(default=1, validator=integer())
    """Overflows, since it was last doubled or halved, that halve it; each is skipped."""


def loss_scale_of(value: "LossScale | Mapping[str, Any] | None") -> "LossScale | None":
    """Build the settings from a table; None stays None.

    Raises:
        ConfigError: the value is not a table, or a setting is unknown or out of range.
    """
    if value is None or isinstance(value, LossScale):
        return value
    known = [f.name for f in fields(LossScale)]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"loss_scale is {short_repr(value)}; give a table of {', '.join(known)}, such as"
            " {initial = 65536}"
        )
    for key in value:
        if key not in known:
            raise ConfigError(
                f"loss_scale has unknown setting {short_repr(key)}; {nearest(str(key), known)}"
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


def check_audit(options: Any, what: str) -> None:
    """Check that no audit is requested for a model that does not support audits.

    Raises:
        ConfigError: an audit is requested.
    """
    if options.audit_every is not None:
        raise ConfigError(f"audit_every audits no {what.removeprefix('a ')}; leave it out")
