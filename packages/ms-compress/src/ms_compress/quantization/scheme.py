"""Quantization schemes: frozen values that define storage of weights and rounding of activations.

Fields have the names and meanings of compressed-tensors' `QuantizationArgs`. A weight is
``(code - zero) * scale``, with an integer or floating-point code, and one scale for each group of
weights that `strategy` defines. The schemes themselves are defined in `targets/NAME/rules.py`, and
their numbers follow the target's own code, so that training computes the same as the target.
"""

from collections.abc import Callable
from math import floor, log2
from typing import TYPE_CHECKING, Any, Literal

from attrs import Factory, field, frozen

from ms_compress.arguments import check_integer, check_items, check_type, shown
from ms_compress.errors import SchemeError

if TYPE_CHECKING:
    import torch

ElementType = Literal["int", "float"]
Strategy = Literal["tensor", "channel", "token", "group", "block", "tensor_group"]
"""Values that share a scale: all of a tensor, a row of a weight, a token of an input, `group_size`
adjacent values, a block of `block_structure` weights, or groups whose scales share another scale
for the tensor."""
Rounding = Literal["away", "away_from_low", "even", "up"]
"""Rounding of halves: away from zero, away from `low` (codes are rounded after the zero point is
added), to even, or up, as floor(v + ½) does. Floating-point codes are rounded to even."""

SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e8m0fnu")


@frozen(kw_only=True)
class FloatFormat:
    """Floating-point format of a code: a sign, an exponent and a mantissa, without infinity."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    high: int
    """Largest value; larger magnitudes saturate. Compilers treat integers as constants."""

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value; smaller values have the same spacing."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest value."""
        return floor(log2(self.high))


E4M3 = FloatFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, high=448)
E5M2 = FloatFormat(name="e5m2", exponent_bits=5, mantissa_bits=2, high=57344)
E2M1 = FloatFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, high=6)
FLOAT_FORMATS = {8: E4M3, 4: E2M1}
"""Format of a scheme's floating-point codes, by number of bits."""
WIDTHS = (2, 3, 4, 5, 6, 8)
"""Supported numbers of bits of a weight's code."""


def _bits(rule: "Activations | Scheme") -> int:
    # A scheme with another number of bits is rejected when all its fields are set.
    return rule.num_bits if isinstance(rule.num_bits, int) and rule.num_bits in WIDTHS else 8


def _default_high(rule: "Activations | Scheme") -> int:
    if rule.type == "int":
        return (1 << (_bits(rule) - 1)) - 1
    return FLOAT_FORMATS.get(_bits(rule), E4M3).high


def _default_low(rule: "Activations | Scheme") -> int:
    if rule.type == "int":
        return -(1 << (_bits(rule) - 1))
    return -rule.high if isinstance(rule.high, int | float) else 0


def _one_of(*choices: object) -> Callable[[Any, Any, Any], None]:
    """Return a validator that requires one of the choices."""

    def check(instance: Any, attribute: Any, value: Any) -> None:
        if type(value) not in map(type, choices) or value not in choices:
            words = ", ".join(map(repr, choices))
            raise SchemeError(f"{attribute.name} must be one of {words}, got {shown(value)}")

    return check


def _optional_count(instance: Any, attribute: Any, value: object) -> None:
    """Require a number of weights, or None."""
    check_integer(attribute.name, value, minimum=1, error=SchemeError, optional=True)


def _counts(instance: Any, attribute: Any, value: object) -> None:
    """Require numbers of weights, or None."""
    if value is not None:
        check_items(attribute.name, value, int, "numbers of weights", error=SchemeError)
        if not value:
            raise SchemeError(f"{attribute.name} must have a number of weights, got none; use None")


def _code(instance: Any, attribute: Any, value: object) -> None:
    """Require a number."""
    check_type(attribute.name, value, (int, float), "a number", error=SchemeError)


@frozen(kw_only=True)
class SuperBlock:
    """Super-block of llama.cpp's K-quants: its groups' scales are integers times one float16 scale.

    With minimums, a group's smallest weight is an integer times a second float16 scale, and a
    weight is ``code * scale - minimum``.
    """

    size: int
    """Number of consecutive weights that share the float16 scales."""
    groups: int
    """Number of groups per super-block."""
    low: int
    high: int
    """Smallest and largest integer scale."""
    has_minimums: bool
    """Whether groups also have minimums, stored as integers in the same range as the scales."""

    @property
    def scales_per_block(self) -> int:
        """Number of float16 scales of a super-block."""
        return 2 if self.has_minimums else 1


@frozen(kw_only=True)
class Activations:
    """Rounding of a linear layer's input at run time."""

    num_bits: int
    type: ElementType = "int"
    group_size: int | None = None
    """Number of adjacent features that share a scale. None: all features of a token or tensor."""
    strategy: Strategy = Factory(
        lambda rule: "group" if rule.group_size else "token", takes_self=True
    )
    high: int = Factory(_default_high, takes_self=True)
    """Largest code; by default, that of the element type."""
    low: int = Factory(_default_low, takes_self=True)
    dynamic: bool | Literal["local"] = True
    """Whether scales follow the input of each forward (True), come from calibration (False), or
    follow the input in units of a calibrated scale ("local", for strategy `tensor_group`)."""
    scale_dtype: str = field(default="float32", validator=_one_of(*SCALE_DTYPES))
    by_inverse: bool = False
    """Codes are computed as value * (divisor / largest), not as value / scale."""
    scale_of_inverse: bool = False
    """With `by_inverse`, the scale is 1 / (divisor / largest), not largest / divisor."""

    def __attrs_post_init__(self) -> None:
        expected = {"tensor": False, "tensor_group": "local"}.get(self.strategy, True)
        if self.dynamic != expected:
            raise SchemeError(
                f"dynamic must be {expected!r} for inputs with strategy {self.strategy!r}, got"
                f" {self.dynamic!r}; use {expected!r}"
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether scales need the largest input of a calibration."""
        return self.dynamic is not True

    @property
    def element(self) -> FloatFormat | None:
        """Format of floating-point codes; None for integers."""
        return None if self.type == "int" else FLOAT_FORMATS[self.num_bits]

    @property
    def divisor(self) -> float:
        """The scale is the largest magnitude of the group divided by this."""
        return (self.high - self.low) / 2  # not a field: compilers treat integers as constants


KV_CACHE = Activations(num_bits=8, type="float", strategy="tensor", dynamic=False)
"""Rounding of cached keys and values: one E4M3 scale per decoder layer for each."""


@frozen(kw_only=True)
class Scheme:
    """Storage of weights by a target, and rounding of activations at run time."""

    name: str
    target: str
    """Folder in `targets/` that implements it."""
    num_bits: int = field(validator=_one_of(*WIDTHS))
    type: ElementType = field(default="int", validator=_one_of("int", "float"))
    group_size: int | None = field(default=None, validator=_optional_count)
    """Number of weights in a row that share a scale. None: the whole row, tensor or block."""
    groups: tuple[int, ...] | None = field(default=None, validator=_counts)
    """Group sizes that the target supports. None: any."""
    strategy: Strategy = Factory(
        lambda scheme: "channel" if scheme.group_size is None else "group", takes_self=True
    )
    block_structure: tuple[int, int] | None = field(default=None, validator=_counts)
    """Rows and columns of the blocks that share a scale; the last blocks may be smaller."""
    symmetric: bool = True
    """Whether zero has code 0. Otherwise each group has an integer zero point."""
    high: int = field(default=Factory(_default_high, takes_self=True), validator=_code)
    """Largest code; by default, that of the element type."""
    low: int = field(default=Factory(_default_low, takes_self=True), validator=_code)
    signed_peak: bool = False
    """Whether the peak is the value of largest magnitude with its sign, or the magnitude itself."""
    first_peak: bool = False
    """Use the first of two values equally far from zero as the peak, instead of the lower one."""
    rounding: Rounding = "even"
    by_inverse: bool = False
    """Codes are computed as value * (1 / scale), not as value / scale."""
    exact_step: bool = False
    """Codes are computed with the scale before it is rounded to `scale_dtype`."""
    scale_dtype: str = field(default="float32", validator=_one_of(*SCALE_DTYPES))
    eps_for_zeros: bool = False
    """The scale of an all-zero group is the scale dtype's epsilon instead of 0."""
    super_block: SuperBlock | None = None
    """Super-blocks of groups with integer scales; `scale_dtype` is then the dtype of the
    super-blocks' scales."""
    values: tuple[int, ...] | None = field(default=None, validator=_counts)
    """Ascending values that codes can have, if these are not all integers from `low` to `high`."""
    fallback: str | None = None
    """Fallback scheme for layers whose row length is not a multiple of the super-block."""
    larger: str | None = None
    """Scheme of the layers that a mixture such as `gguf.q4_k_m` stores with more bits."""
    embeddings: bool = True
    """Whether the target can also read embeddings in this scheme."""
    activations: Activations | None = None
    input_ndim: int | None = None
    """Number of input dims for which the runtime's activation scales match `activations`. None:
    any."""
    format: str | None = None
    """Name of the storage format, if the target has several. None: its default."""

    def __attrs_post_init__(self) -> None:
        if self.type != "int" and self.num_bits not in FLOAT_FORMATS:
            raise SchemeError(
                f"{self.name}: num_bits of type 'float' must be 4 or 8, got {self.num_bits}; use 8"
            )
        count = self.high - self.low + 1 if self.values is None else len(self.values)
        if self.type == "int" and count > 2**self.num_bits:
            raise SchemeError(
                f"{self.name}: codes from {self.low} to {self.high} do not fit {self.num_bits} bits"
            )
        if self.groups is not None and self.group_size not in self.groups:
            raise SchemeError(
                f"{self.name}: group must be one of {', '.join(map(str, self.groups))} for"
                f" {self.target}, got {self.group_size}; use {self.groups[0]}"
            )
        if (self.strategy in ("group", "tensor_group")) != (self.group_size is not None):
            raise SchemeError(
                f"{self.name}: strategy must be 'group' or 'tensor_group' with a group_size, and"
                f" another one without, got {self.strategy!r} and {self.group_size}; set both or"
                " neither"
            )
        if (self.strategy == "block") != (self.block_structure is not None):
            raise SchemeError(
                f"{self.name}: strategy must be 'block' with a block_structure, and another one"
                f" without, got {self.strategy!r} and {self.block_structure}; set both or neither"
            )

    @property
    def element(self) -> FloatFormat | None:
        """Format of floating-point codes; None for integers."""
        return None if self.type == "int" else FLOAT_FORMATS[self.num_bits]

    @property
    def divisor(self) -> float:
        """The scale is the peak of the group divided by this."""
        if not self.symmetric:
            return self.high - self.low
        return self.low if self.signed_peak else (self.high - self.low) / 2

    @property
    def has_zero(self) -> bool:
        """Whether every group can store zero exactly, as pruned weights need."""
        if self.values is not None:
            return 0 in self.values
        return self.super_block is None or not self.super_block.has_minimums

    @property
    def end_spacing(self) -> float:
        """Distance of the largest code from the one below it."""
        if self.values is not None:
            return self.values[-1] - self.values[-2]
        element = self.element
        return 1.0 if element is None else 2.0 ** (element.max_exponent - element.mantissa_bits)

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype of stored scales."""
        import torch  # not at module level: reading run files, which name schemes, must be fast

        if self.super_block is not None:
            return torch.int8
        dtype: torch.dtype = getattr(torch, self.scale_dtype)
        return dtype

    @property
    def code_dtype(self) -> "torch.dtype":
        """Dtype of codes before packing; E4M3 also has every value of E2M1."""
        import torch

        return torch.int8 if self.type == "int" else torch.float8_e4m3fn

    @property
    def spans_rows(self) -> bool:
        """Whether a scale is computed from several rows, so that rows cannot be split."""
        return self.strategy in ("tensor", "block", "tensor_group")

    def group_of(self, features: int) -> int:
        """Return the number of adjacent weights per scale in rows of `features`."""
        if self.block_structure is not None:
            return self.block_structure[1]
        return self.group_size or features

    def scale_shape(self, rows: int, features: int) -> tuple[int, int]:
        """Return the shape (R, G) of the scales of a weight (rows, features)."""
        if self.strategy == "tensor":
            return 1, 1
        height = 1 if self.block_structure is None else self.block_structure[0]
        return -(-rows // height), -(-features // self.group_of(features))

    def row_unit(self, features: int) -> int:
        """Return the number of adjacent weights that must stay together when rows are split."""
        return self.group_of(features) if self.super_block is None else self.super_block.size

    def factor_shape(self, rows: int, features: int) -> tuple[int, int]:
        """Return the shape of the learned factor: one value per scale, and one per minimum."""
        height, groups = self.scale_shape(rows, features)
        has_minimums = self.super_block is not None and self.super_block.has_minimums
        return height, groups * (2 if has_minimums else 1)

    def __str__(self) -> str:
        return self.name
