"""Schemes: how a target stores weights and rounds activations, as frozen values with names.

A scheme's numbers are those of its target's own code, so that what is trained under it is what the
target computes. A weight is ``code * scale`` with a whole code from `low` to `high`, one scale for
`group` neighbours of a row. The sources of the rules:

- gguf: `quantize_row_q8_0_ref`, `quantize_row_q4_0_ref` of ggml-quants.c; activations as
  `quantize_row_q8_0` of its x86 code, which every quantised product on CPU applies to its input.
- ort: `BlockwiseQuantizer` of MLAS, symmetric, the numbers of the operator MatMulNBits.
- ct: `calculate_qparams` and `quantize` of compressed-tensors, symmetric integers.
"""

import re
from typing import TYPE_CHECKING, Literal

from attrs import evolve, field, frozen, validators

from ms_compress.errors import SchemeError
from ms_compress.settings import nearest

if TYPE_CHECKING:
    import torch

__all__ = ["NAMES", "Activations", "Rounding", "Scheme", "scheme"]

Rounding = Literal["away", "even", "up"]
"""A half goes away from zero, to the even neighbour, or (as floor(v + ½) does) up."""

DTYPES = ("float16", "bfloat16", "float32")
GROUPS = {"gguf": (32,), "ort": (16, 32, 64, 128, 256)}
"""What a block of llama.cpp holds, and MatMulNBits takes; compressed-tensors takes any."""


@frozen(kw_only=True)
class Activations:
    """How a target rounds the input of a linear layer while it runs."""

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
    """How weights, and while it runs activations, are held in a few bits."""

    name: str
    target: Literal["gguf", "ort", "ct"]
    """Whose files hold it, and whose rules it follows."""
    bits: int = field(validator=validators.in_((3, 4, 8)))
    group: int | None
    """Weights of one row that share a scale; None: a whole row."""
    low: int
    high: int
    signed_peak: bool
    """The peak is the value of largest magnitude with its sign, else without."""
    rounding: Rounding
    by_inverse: bool
    """Codes are products with 1 / scale, not quotients by the scale."""
    exact_step: bool
    """Codes are made with the scale before it is rounded to `scale_dtype`."""
    scale_dtype: str = field(validator=validators.in_(DTYPES))
    eps_for_zeros: bool = False
    """The scale of a group of zeros is float32's epsilon, not 0."""
    activations: Activations | None = None

    def __attrs_post_init__(self) -> None:
        if self.high - self.low >= 2**self.bits:
            raise SchemeError(
                f"{self.name}: codes from {self.low} to {self.high} do not fit {self.bits} bits"
            )
        if self.group is not None and self.group < 1:
            raise SchemeError(f"{self.name}: group is {self.group}; give 1 or more")
        taken = GROUPS.get(self.target, (self.group,))
        if self.group not in taken:
            raise SchemeError(
                f"{self.name}: group is {self.group}; {self.target} takes groups of"
                f" {', '.join(map(str, taken))}"
            )

    @property
    def symmetric(self) -> bool:
        """A weight of zero has code zero, always: so zeros of a mask survive."""
        return True

    @property
    def divisor(self) -> float:
        """The scale is the group's peak divided by this."""
        return self.low if self.signed_peak else (self.high - self.low) / 2

    @property
    def dtype(self) -> "torch.dtype":
        """In which scales are stored."""
        import torch  # not at the top: settings name schemes, and reading them shall be fast

        found: torch.dtype = getattr(torch, self.scale_dtype)
        return found

    def group_of(self, features: int) -> int:
        """Weights that share a scale in rows of so many."""
        return self.group or features

    def bits_a_weight(self, features: int) -> float:
        """Bits that a weight takes in rows of so many, its share of the scale included."""
        return self.bits + 8 * self.dtype.itemsize / self.group_of(features)

    def __str__(self) -> str:
        return self.name


Q8_BLOCKS = Activations(
    bits=8,
    group=32,
    low=-127,
    high=127,
    scale_dtype="float16",
    by_inverse=True,
)
EACH_TOKEN = Activations(
    bits=8,
    group=None,
    low=-128,
    high=127,
    scale_dtype="float32",
    by_inverse=False,
)

Q8_0 = Scheme(
    name="gguf.q8_0",
    target="gguf",
    bits=8,
    group=32,
    low=-127,
    high=127,
    signed_peak=False,
    rounding="away",
    by_inverse=True,
    exact_step=True,
    scale_dtype="float16",
    activations=Q8_BLOCKS,
)
Q4_0 = evolve(Q8_0, name="gguf.q4_0", bits=4, low=-8, high=7, signed_peak=True, rounding="up")
MATMUL_NBITS = evolve(
    Q4_0,
    name="ort.matmulnbits",
    target="ort",
    rounding="away",
    exact_step=False,
    scale_dtype="float32",
    activations=None,
)
INT4_G32 = Scheme(
    name="ct.int4_g32",
    target="ct",
    bits=4,
    group=32,
    low=-8,
    high=7,
    signed_peak=False,
    rounding="even",
    by_inverse=False,
    exact_step=False,
    scale_dtype="float32",
    eps_for_zeros=True,
)
W8A8 = evolve(
    INT4_G32,
    name="ct.w8a8",
    bits=8,
    group=None,
    low=-128,
    high=127,
    activations=EACH_TOKEN,
)
INT3_G32 = evolve(INT4_G32, name="ct.int3_g32", bits=3, low=-4, high=3)
"""transformers reads it; no deployment kernel of three bits is known to us."""

FIXED = {each.name: each for each in (Q8_0, Q4_0, MATMUL_NBITS, INT4_G32, INT3_G32, W8A8)}
NAMES = tuple(FIXED)
"""The schemes by name; `ct.int4_g64` and `ort.matmulnbits_g128` and the like are known too."""

GROUPED = {
    re.compile(r"ct\.int4_g(\d+)"): INT4_G32,
    re.compile(r"ct\.int3_g(\d+)"): INT3_G32,
    re.compile(r"ort\.matmulnbits_g(\d+)"): MATMUL_NBITS,
}


def scheme(name: "str | Scheme") -> Scheme:
    """The scheme of a name such as `"gguf.q4_0"`; a scheme is returned as it is.

    Raises:
        SchemeError: there is none, or its target takes no such group; the message gives the
            nearest name, or the groups that fit.
    """
    if isinstance(name, Scheme):
        return name
    if name in FIXED:
        return FIXED[name]
    for pattern, base in GROUPED.items():
        if match := pattern.fullmatch(name):
            return evolve(base, name=name, group=int(match[1]))
    raise SchemeError(f"there is no scheme {name!r}; {nearest(name, NAMES)}")
