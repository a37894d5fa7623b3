"""Checks of plain Python values: finite numbers, integers, strings from a fixed set."""

from collections.abc import Callable

MAX_FINITE = 3.4e38
"""Largest number that stays finite in float32, the dtype that kernels compute in."""

MIN_NORMAL = 1.2e-38
"""Smallest positive normal float32; smaller numbers may flush to 0."""


def is_number(value: object, minimum: float = -MAX_FINITE, below: float = float("inf")) -> bool:
    """Whether `value` is a number, not a bool, from `minimum` to `MAX_FINITE` and below `below`.

    Large ints are compared as ints, since converting them to float could overflow.
    """
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    return minimum <= value <= MAX_FINITE and value < below


def is_integer(value: object, minimum: int = -(2**63), maximum: int = 2**63 - 1) -> bool:
    """Whether `value` is an int (not a bool) from `minimum` to `maximum`."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def one_of(*names: str) -> Callable[[object], bool]:
    """Return a check that a value is one of the strings `names`."""
    return lambda value: isinstance(value, str) and value in names
