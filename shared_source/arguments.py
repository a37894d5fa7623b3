"""Checks of arguments of public functions; a message names the argument and shows its value."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

MAX_CHARACTERS = 80
SHOWN = (str, bytes, bool, int, float, list, tuple, dict)
"""Types whose values are shown; a value of another type is described by its type."""


def check_type(
    name: str,
    value: object,
    types: type | tuple[type, ...],
    description: str,
    *,
    error: type[Exception],
    optional: bool = False,
) -> None:
    """Check the type of an argument.

    Args:
        name: name of the argument.
        value: its value.
        types: accepted types.
        description: the accepted types in words, such as "a torch.nn.Module".
        error: exception class to raise.
        optional: accept None.

    Raises:
        error: the value has another type.
    """
    if not (isinstance(value, types) or (optional and value is None)):
        raise error(f"{name} must be {description}, got {shown(value)}")


def check_callable(
    name: str, value: object, *, error: type[Exception], optional: bool = False
) -> None:
    """Check that an argument can be called.

    Raises:
        error: it cannot.
    """
    if not (callable(value) or (optional and value is None)):
        raise error(f"{name} must be callable, got {shown(value)}")


def check_flags(*, error: type[Exception], **flags: object) -> None:
    """Check that arguments, given by name, are True or False.

    Raises:
        error: one is not; the message names it.
    """
    for name, value in flags.items():
        check_type(name, value, bool, "True or False", error=error)


def check_integer(
    name: str,
    value: object,
    *,
    minimum: int,
    maximum: float = math.inf,
    error: type[Exception],
    optional: bool = False,
) -> None:
    """Check an integer and its range; a bool is not an integer.

    Raises:
        error: the value is not an integer from `minimum` to `maximum`.
    """
    if optional and value is None:
        return
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not minimum <= value <= maximum:  # type: ignore[operator]
        upper = f" and at most {maximum}" if maximum < math.inf else ""
        raise error(f"{name} must be an integer of at least {minimum}{upper}, got {shown(value)}")


def check_number(
    name: str, value: object, *, minimum: float, error: type[Exception], optional: bool = False
) -> None:
    """Check a finite number and its range; a bool is not a number.

    Raises:
        error: the value is not a finite number of at least `minimum`.
    """
    if optional and value is None:
        return
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not minimum <= value < math.inf:  # type: ignore[operator]
        raise error(f"{name} must be a number of at least {minimum:g}, got {shown(value)}")


def check_items(
    name: str,
    value: Any,
    types: type | tuple[type, ...],
    description: str,
    *,
    error: type[Exception],
) -> None:
    """Check that an argument is a list or another collection whose items have a type.

    Args:
        name: name of the argument.
        value: its value; an iterator would be consumed, so pass a collection.
        types: accepted types of an item.
        description: the items in words, such as "names of layers".
        error: exception class to raise.

    Raises:
        error: the value is a text or not a collection, or an item has another type.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise error(f"{name} must be a list of {description}, got {shown(value)}")
    for item in value:
        if not isinstance(item, types):
            raise error(f"{name} must be a list of {description}, got {shown(item)} in it")


def shown(value: object) -> str:
    """Show a value in one line of bounded length."""
    if value is None:
        return "None"
    if not isinstance(value, SHOWN):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 4 * MAX_CHARACTERS:
        return f"an integer of {value.bit_length()} bits"  # str() fails above 4,300 digits
    text = " ".join(repr(value).splitlines())
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
