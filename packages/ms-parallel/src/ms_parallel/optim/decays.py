"""Learning rate decays after the warm-up."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from attrs import Attribute, field, fields, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.optim.names import check_known, resolve_name
from ms_parallel.settings import number, one_of


class Decay(Protocol):
    """Learning rate decay, with its settings."""

    def remaining(self, progress: float) -> float:
        """Return the decay factor, from 1 to 0, at `progress` from 0 to 1."""


@frozen(kw_only=True)
class LinearDecay:
    """Linear decay from the peak learning rate to the floor."""

    def remaining(self, progress: float) -> float:
        """Return the decay factor, from 1 to 0, at `progress` from 0 to 1."""
        return 1.0 - progress


@frozen(kw_only=True)
class CosineDecay:
    """Half-cosine decay (Loshchilov and Hutter, 2017): slow at first and at the end."""

    def remaining(self, progress: float) -> float:
        """Return the decay factor, from 1 to 0, at `progress` from 0 to 1."""
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@frozen(kw_only=True)
class WarmupStableDecay:
    """Warmup-stable-decay (Hu et al., 2024): constant after the warm-up, decayed at the end.

    Raises:
        ConfigError: a value is out of range.
    """

    share: float = field(default=0.2, validator=number(minimum=1e-9, maximum=1.0))
    """Fraction of the steps after the warm-up over which the learning rate decays."""
    shape: Literal["linear", "sqrt"] = field(default="linear", validator=one_of("linear", "sqrt"))
    """Linear, or 1 - sqrt(t), which decays faster at first (Hägele et al., 2024)."""

    def remaining(self, progress: float) -> float:
        """Return the decay factor, from 1 to 0, at `progress` from 0 to 1."""
        elapsed = max(progress - (1.0 - self.share), 0.0) / self.share
        return 1.0 - min(math.sqrt(elapsed) if self.shape == "sqrt" else elapsed, 1.0)


DECAYS: Mapping[str, Callable[..., Decay]] = {
    "cosine": CosineDecay,
    "linear": LinearDecay,
    "wsd": WarmupStableDecay,
}
"""Decays by the names of the setting `decay`."""


def decay_of(value: object) -> Decay:
    """Build a decay from its name, or from a table of its `name` and settings.

    Raises:
        ConfigError: the name or a setting is unknown.
    """
    name, settings = resolve_name("decay", value, DECAYS)
    decay_class: Any = DECAYS[name]
    check_known(f"decay {name!r}", settings, [f.name for f in fields(decay_class)])
    return DECAYS[name](**settings)


def decay(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Validate that a decay of this name exists and accepts its settings."""
    try:
        decay_of(value)
    except ConfigError as error:
        message = str(error)
        raise ConfigError(attribute.name + message.removeprefix("decay")) from error
