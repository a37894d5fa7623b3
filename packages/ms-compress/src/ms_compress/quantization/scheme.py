"""Quantization schemes: how a target stores weights and rounds activations, as frozen values.

A scheme's numbers follow its target's own code, so that training computes the same as the target. A
weight is ``code * scale`` with an integer code from `low` to `high` and one scale per `group`
adjacent weights of a row. The schemes themselves are defined in `targets/NAME/rules.py`.
"""

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen, validators

from ms_compress.errors import SchemeError

if TYPE_CHECKING:
    import torch

Rounding = Literal["away", "away_from_low", "even", "up"]
"""Rounding of halves: away from zero, away from `low` (codes are rounded after the zero point is
added), to even, or up, as floor(v + ½) does."""

DTYPES = ("float16", "bfloat16", "float32")


@frozen(kw_only=True)
class Activations:
    """Rounding of a linear layer's input at run time."""

    bits: int
    group: int | None
    """Number of adjacent features that share a scale. None: all features of a token."""
    low: int
    high: int
    scale_dtype: str
    by_inverse: bool
    """Codes are computed as value * (divisor / largest), not as value / scale."""

    @property
    def divisor(self) -> float:
        """The scale is the largest magnitude of the group divided by this."""
        return (self.high - self.low) / 2  # not a field: compilers treat integers as constants


@frozen(kw_only=True)
class Scheme:
    """How a target stores weights, and rounds activations at run time."""

    name: str
    target: str
    """Folder in `targets/` that implements it."""
    bits: int = field(validator=validators.in_((3, 4, 8)))
    group: int | None
    """Number of weights in a row that share a scale. None: the whole row."""
    groups: tuple[int, ...] | None = None
    """Group sizes that the target supports. None: any."""
    low: int
    high: int
    signed_peak: bool
    """Whether the peak is the value of largest magnitude with its sign, or the magnitude itself."""
    first_peak: bool = False
    """Use the first of two values equally far from zero as the peak, instead of the lower one."""
    rounding: Rounding
    by_inverse: bool
    """Codes are computed as value * (1 / scale), not as value / scale."""
    exact_step: bool
    """Codes are computed with the scale before it is rounded to `scale_dtype`."""
    scale_dtype: str = field(validator=validators.in_(DTYPES))
    eps_for_zeros: bool = False
    """The scale of an all-zero group is float32's epsilon instead of 0."""
    embeddings: bool = True
    """Whether the target can also read embeddings in this scheme."""
    activations: Activations | None = None
    input_ndim: int | None = None
    """Number of input dims for which the runtime's activation scales match `activations`. None:
    any."""

    def __attrs_post_init__(self) -> None:
        if self.high - self.low >= 2**self.bits:
            raise SchemeError(
                f"{self.name}: codes from {self.low} to {self.high} do not fit {self.bits} bits"
            )
        if self.group is not None and self.group < 1:
            raise SchemeError(f"{self.name}: group must be at least 1, got {self.group}; use 32")
        if self.groups is not None and self.group not in self.groups:
            raise SchemeError(
                f"{self.name}: group must be one of {', '.join(map(str, self.groups))} for"
                f" {self.target}, got {self.group}"
            )

    @property
    def divisor(self) -> float:
        """The scale is the peak of the group divided by this."""
        return self.low if self.signed_peak else (self.high - self.low) / 2

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype of stored scales."""
        import torch  # not at module level: reading run files, which name schemes, must be fast

        dtype: torch.dtype = getattr(torch, self.scale_dtype)
        return dtype

    def group_of(self, features: int) -> int:
        """Return the number of weights per scale in rows of `features`."""
        return self.group or features

    def bits_a_weight(self, features: int) -> float:
        """Return the bits per weight in rows of `features`, including its share of the scale."""
        return self.bits + 8 * self.dtype.itemsize / self.group_of(features)

    def __str__(self) -> str:
        return self.name
