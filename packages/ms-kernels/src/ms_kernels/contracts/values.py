"""Checks of plain Python values: finite numbers, whole numbers, one of some words."""

from collections.abc import Callable

LARGEST = 3.4e38
"""Numbers above it are infinite in float32, which kernels compute in."""

SMALLEST = 1.2e-38
"""Positive numbers below it may be 0 in float32, and one over them infinite."""


def is_number(value: object, least: float = -LARGEST, below: float = float("inf")) -> bool:
    """Return whether `value` is a number from `least` to `LARGEST` under `below`; a bool is none.

    A whole number may have any number of digits, and is compared without making a float of it.
    """
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    return least <= value <= LARGEST and value < below


def is_whole(value: object, least: int = -(2**63), most: int = 2**63 - 1) -> bool:
    """Return whether `value` is a whole number from `least` to `most`; a bool is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def one_of(*names: str) -> Callable[[object], bool]:
    """Return whether a value is one of some words."""
    return lambda value: isinstance(value, str) and value in names
