"""Rotary positions as values: base, width, and how frequencies are stretched to longer contexts."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from attrs import Attribute, field, fields, frozen

from ms_parallel.errors import ConfigError
from ms_parallel.models.config import above_zero, size
from ms_parallel.settings import flag, nearest, number

Kind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]

NEEDED: Mapping[str, tuple[str, ...]] = {
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
"""What config.json has to say of each kind; yarn's factor may be null."""
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
"""What it may say besides."""

_number = number(least=1e-30, optional=True)


def _factors(instance: object, attribute: "Attribute[Any]", value: Any) -> None:
    """Check for numbers above zero; None passes."""
    for each in value or ():
        above_zero(instance, attribute, each)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched to longer contexts."""

    kind: Kind
    factor: float | None = field(default=None, validator=_number)
    """How far; yarn and longrope take the quotient of the two maxima of positions for None."""
    low_freq_factor: float = field(default=1.0, validator=above_zero)
    """llama3: wavelengths above original/low are stretched fully."""
    high_freq_factor: float = field(default=4.0, validator=above_zero)
    """llama3: wavelengths below original/high are left alone."""
    original_max_position_embeddings: int = field(default=8192, validator=size)
    """llama3, yarn, longrope: positions of the first pre-training."""
    attention_factor: float | None = field(default=None, validator=_number)
    """yarn, longrope: what cosines and sines are multiplied by; None for what the papers say."""
    beta_fast: float | None = field(default=None, validator=_number)
    """yarn: frequencies that turn more often than this are left alone; None for 32."""
    beta_slow: float | None = field(default=None, validator=_number)
    """yarn: frequencies that turn less often than this are stretched fully; None for 1."""
    mscale: float | None = field(default=None, validator=_number)
    """yarn: with `mscale_all_dim`, makes the attention factor a quotient of two."""
    mscale_all_dim: float | None = field(default=None, validator=_number)
    """yarn: see `mscale`."""
    truncate: bool = field(default=True, validator=flag)
    """yarn: the ramp between stretched and left alone begins and ends at whole dims."""
    short_factor: tuple[float, ...] | None = field(
        default=None, converter=_as_tuple, validator=_factors
    )
    """longrope: of each frequency, in texts of up to `original_max_position_embeddings`."""
    long_factor: tuple[float, ...] | None = field(
        default=None, converter=_as_tuple, validator=_factors
    )
    """longrope: of each frequency, in longer texts."""

    def __attrs_post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            shown = repr(self.kind)[:60]
            raise ConfigError(f"unknown rope scaling {shown}; known: {', '.join(get_args(Kind))}")
        for name in NEEDED[self.kind]:
            if getattr(self, name) is None and (self.kind, name) != ("yarn", "factor"):
                raise ConfigError(f"rope_scaling lacks {name!r}, which {self.kind!r} needs")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling high_freq_factor={self.high_freq_factor} must be above"
                f" low_freq_factor={self.low_freq_factor}"
            )


@frozen(kw_only=True)
class Rope:
    """The rotary positions of some layers.

    Raises:
        ConfigError: the width is odd, or the scaling does not fit it.
    """

    theta: float
    """Base of the frequencies."""
    width: int
    """Dims of a head that turn: the first so many."""
    scaling: RopeScaling | None = None
    max_position_embeddings: int
    """Positions that the model is meant for."""

    def __attrs_post_init__(self) -> None:
        if self.width % 2 or self.width < 2:
            raise ConfigError(
                f"{self.width} dims of a head turn; positions need an even number, 2 or more"
            )
        scaling = self.scaling
        if scaling is None:
            return
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            if factors is not None and len(factors) != self.width // 2:
                raise ConfigError(
                    f"rope scaling {name} has {len(factors)} numbers, but {self.width // 2}"
                    " frequencies; give one for each"
                )
        if scaling.kind == "dynamic" and self.width < 4:
            raise ConfigError("rope scaling 'dynamic' needs heads of 4 dims or more")
        if scaling.kind == "yarn" and self.theta <= 1:
            raise ConfigError(f"rope scaling 'yarn' needs a rope_theta above 1, not {self.theta}")

    @property
    def length_limit(self) -> int | None:
        """Positions beyond which frequencies depend on the whole text's length, if any do."""
        match self.scaling:
            case RopeScaling(kind="dynamic"):
                return self.max_position_embeddings
            case RopeScaling(kind="longrope"):
                return self.scaling.original_max_position_embeddings
        return None


def as_rope_scaling(value: Any) -> Any:
    """Take a mapping of settings for the value that they are of."""
    if not isinstance(value, Mapping):
        return value
    known = [setting.name for setting in fields(RopeScaling)]
    for key in value:
        if key not in known:
            raise ConfigError(f"unknown rope_scaling setting {key!r}; {nearest(key, known)}")
    if "kind" not in value:
        raise ConfigError("rope_scaling lacks 'kind'; give kind and factor")
    return RopeScaling(**value)
