"""Rotary positions as values: base, width, and how frequencies are stretched to longer contexts."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, fields, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.models.config import above_zero, size
from ms_parallel.settings import nearest

__all__ = ["Rope", "RopeScaling", "as_rope_scaling"]


@frozen(kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts."""

    kind: Literal["linear", "llama3"]
    factor: float = field(validator=above_zero)
    low_freq_factor: float = field(default=1.0, validator=above_zero)
    """llama3: wavelengths above original/low are stretched fully."""
    high_freq_factor: float = field(default=4.0, validator=above_zero)
    """llama3: wavelengths below original/high are left alone."""
    original_max_position_embeddings: int = field(default=8192, validator=size)
    """llama3: positions of the first pre-training."""

    def __attrs_post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            shown = repr(self.kind)[:60]
            raise ConfigError(f"unknown rope scaling {shown}; known: linear, llama3")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling high_freq_factor={self.high_freq_factor} must be above"
                f" low_freq_factor={self.low_freq_factor}"
            )


@frozen(kw_only=True)
class Rope:
    """The rotary positions of some layers."""

    theta: float
    """Base of the frequencies."""
    width: int
    """Dims of a head that turn: the first so many."""
    scaling: RopeScaling | None = None
    max_position_embeddings: int
    """Positions that the model is meant for."""


def as_rope_scaling(value: Any) -> Any:
    """Take a mapping of settings for the value that they are of."""
    if not isinstance(value, Mapping):
        return value
    known = [setting.name for setting in fields(RopeScaling)]
    for key in value:
        if key not in known:
            raise ConfigError(f"unknown rope_scaling setting {key!r}; {nearest(key, known)}")
    missing = [each for each in ("kind", "factor") if each not in value]
    if missing:
        raise ConfigError(f"rope_scaling lacks {missing[0]!r}; give kind and factor")
    return RopeScaling(**value)
