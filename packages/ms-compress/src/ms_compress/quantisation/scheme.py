"""Schemes: how a target stores weights and rounds activations, as frozen values.

A scheme's numbers are those of its target's own code, so that what is trained under it is what the
target computes. A weight is ``code * scale`` with a whole code from `low` to `high`, one scale for
`group` neighbours of a row. The schemes themselves stand in `targets/NAME/rules.py`.
"""

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen, validators

from ms_compress.errors import SchemeError

if TYPE_CHECKING:
    import torch

Rounding = Literal["away", "away_from_low", "even", "up"]
"""A half goes away from zero, away from `low` (codes are rounded once the zero point is added), to
the even neighbour, or (as floor(v + ½) does) up."""

DTYPES = ("float16", "bfloat16", "float32")


@frozen(kw_only=True)
class Activations:
    """Rules by which a target rounds the input of a linear layer while it runs."""

    bits: int
    group: int | None
    """Neighbouring features that share a scale; None: all features of a token."""
    low: int
    high: int
    scale_dtype: str
    by_inverse: bool
    """Codes are products with divisor / largest, not quotients by the scale."""

    @property
    def divisor(self) -> float:
        """The scale is the group's largest magnitude divided by this."""
        return (self.high - self.low) / 2  # no field: a compiler takes whole numbers as constants


@frozen(kw_only=True)
class Scheme:
    """Rules by which a target holds weights, and rounds activations while it runs."""

    name: str
    target: str
    """The folder of `targets/` whose files hold it, and whose rules it follows."""
    bits: int = field(validator=validators.in_((3, 4, 8)))
    group: int | None
    """Weights of one row that share a scale; None: a whole row."""
    groups: tuple[int, ...] | None = None
    """Groups that the target takes; None: any."""
    low: int
    high: int
    signed_peak: bool
    """The peak is the value of largest magnitude with its sign, else without."""
    first_peak: bool = False
    """The peak of two values that are equally far from zero is the first, else the lower one."""
    rounding: Rounding
    by_inverse: bool
    """Codes are products with 1 / scale, not quotients by the scale."""
    exact_step: bool
    """Codes are made with the scale before it is rounded to `scale_dtype`."""
    scale_dtype: str = field(validator=validators.in_(DTYPES))
    eps_for_zeros: bool = False
    """The scale of a group of zeros is float32's epsilon, not 0."""
    embeddings: bool = True
    """Whether its target also reads embeddings in this scheme."""
    activations: Activations | None = None
    input_ndim: int | None = None
    """Dims of an input for which the runtime's activation scales are those of `activations`;
    None: of any input."""

    def __attrs_post_init__(self) -> None:
        if self.high - self.low >= 2**self.bits:
            raise SchemeError(
                f"{self.name}: codes from {self.low} to {self.high} do not fit {self.bits} bits"
            )
        if self.group is not None and self.group < 1:
            raise SchemeError(f"{self.name}: group is {self.group}; give 1 or more")
        if self.groups is not None and self.group not in self.groups:
            raise SchemeError(
                f"{self.name}: group is {self.group}; {self.target} takes groups of"
                f" {', '.join(map(str, self.groups))}"
            )

    @property
    def divisor(self) -> float:
        """The scale is the group's peak divided by this."""
        return self.low if self.signed_peak else (self.high - self.low) / 2

    @property
    def dtype(self) -> "torch.dtype":
        """The dtype of stored scales."""
        import torch  # not at the top: run files name schemes, and reading them must be fast

        found: torch.dtype = getattr(torch, self.scale_dtype)
        return found

    def group_of(self, features: int) -> int:
        """Return how many weights share a scale in rows of `features`."""
        return self.group or features

    def bits_a_weight(self, features: int) -> float:
        """Compute the bits of a weight in rows of `features`, its share of the scale included."""
        return self.bits + 8 * self.dtype.itemsize / self.group_of(features)

    def __str__(self) -> str:
        return self.name
