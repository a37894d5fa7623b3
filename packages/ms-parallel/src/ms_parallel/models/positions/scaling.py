"""Rotary settings: base, width, and frequency scaling for longer contexts."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from attrs import Attribute, field, fields, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.models.config import above_zero, size
from ms_parallel.settings import flag, nearest, number

Kind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""Required settings by kind; yarn's factor may be null."""
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor"),
}
"""Optional settings by kind."""

_number = number(minimum=1e-30, optional=True)


def _factors(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    """Check for numbers above zero; None passes."""
    for factor in value or ():
        above_zero(instance, attribute, factor)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for longer contexts."""

    kind: Kind
    factor: float | None = field(default=None, validator=_number)
    """Scaling factor; for yarn and longrope, None means max_position_embeddings /
    original_max_position_embeddings."""
    low_freq_factor: float = field(default=1.0, validator=above_zero)
    """llama3: wavelengths above original/low are fully scaled."""
    high_freq_factor: float = field(default=4.0, validator=above_zero)
    """llama3: wavelengths below original/high are not scaled."""
    original_max_position_embeddings: int = field(default=8192, validator=size)
    """llama3, yarn, longrope: context length of pre-training before scaling."""
    attention_factor: float | None = field(default=None, validator=_number)
    """yarn, longrope: factor on cosines and sines; None for the formula of the paper."""
    beta_fast: float | None = field(default=None, validator=_number)
    """yarn: dims with more rotations than this in the original context are not scaled; None: 32."""
    beta_slow: float | None = field(default=None, validator=_number)
    """yarn: dims with fewer rotations than this are fully scaled; None: 1."""
    mscale: float | None = field(default=None, validator=_number)
    """yarn: numerator of the attention factor, with `mscale_all_dim` as the denominator."""
    mscale_all_dim: float | None = field(default=None, validator=_number)
    """yarn: see `mscale`."""
    truncate: bool = field(default=True, validator=flag)
    """yarn: round the bounds of the ramp between unscaled and scaled dims to integers."""
    short_factor: tuple[float, ...] | None = field(
        default=None, converter=_as_tuple, validator=_factors
    )
    """longrope: factor per frequency for texts of up to `original_max_position_embeddings`."""
    long_factor: tuple[float, ...] | None = field(
        default=None, converter=_as_tuple, validator=_factors
    )
    """longrope: factor per frequency for longer texts."""

    def __attrs_post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            shown = repr(self.kind)[:60]
            raise ConfigError(f"unknown rope scaling {shown}; known: {', '.join(get_args(Kind))}")
        for name in REQUIRED[self.kind]:
            if getattr(self, name) is None and (self.kind, name) != ("yarn", "factor"):
                raise ConfigError(f"rope_scaling of kind {self.kind!r} needs {name!r}")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling high_freq_factor={self.high_freq_factor} must be above"
                f" low_freq_factor={self.low_freq_factor}"
            )


@frozen(kw_only=True)
class Rope:
    """Rotary embedding of some layers.

    Raises:
        ConfigError: the width is odd, or the scaling does not match it.
    """

    theta: float
    """Base of the frequencies."""
    width: int
    """Number of rotated dims, the first ones of a head."""
    scaling: RopeScaling | None = None
    max_position_embeddings: int
    """Maximum context length of the model."""

    def __attrs_post_init__(self) -> None:
        if self.width % 2 or self.width < 2:
            raise ConfigError(
                f"the number of rotated dims per head must be even and at least 2, got {self.width}"
            )
        scaling = self.scaling
        if scaling is None:
            return
        # longrope has one factor per frequency, that is per pair of rotated dims.
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            if factors is not None and len(factors) != self.width // 2:
                raise ConfigError(
                    f"rope scaling {name} must have one number for each of {self.width // 2}"
                    f" frequencies, got {len(factors)}"
                )
        if scaling.kind == "dynamic" and self.width < 4:
            raise ConfigError("rope scaling 'dynamic' needs a head_dim of at least 4")
        if scaling.kind == "yarn" and self.theta <= 1:
            raise ConfigError(f"rope scaling 'yarn' needs rope_theta above 1, got {self.theta}")

    @property
    def length_limit(self) -> int | None:
        """Sequence length beyond which frequencies change; None if they are fixed."""
        match self.scaling:
            case RopeScaling(kind="dynamic"):
                return self.max_position_embeddings
            case RopeScaling(kind="longrope"):
                return self.scaling.original_max_position_embeddings
        return None


def as_rope_scaling(value: Any) -> Any:
    """Convert a mapping of settings to `RopeScaling`."""
    if not isinstance(value, Mapping):
        return value
    names = [setting.name for setting in fields(RopeScaling)]
    for key in value:
        if key not in names:
            raise ConfigError(f"unknown rope_scaling setting {key!r}; {nearest(key, names)}")
    if "kind" not in value:
        raise ConfigError("rope_scaling needs 'kind', for example {'kind': 'linear', 'factor': 2}")
    return RopeScaling(**value)
