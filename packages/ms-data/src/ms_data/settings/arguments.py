"""Checks of argument types and ranges, with one-line errors."""

import operator

from ms_data.errors import SettingError, printable


def check_counts(**arguments: object) -> None:
    """Check that arguments are integers of at least 1.

    Raises:
        SettingError: an argument is not.
    """
    for name, value in arguments.items():
        if not (is_integer(value) and operator.index(value) >= 1):  # type: ignore[arg-type]
            raise SettingError(
                f"{name} must be an integer of at least 1, got {printable(repr(value))}"
            )


def check_fraction(name: str, value: object) -> float:
    """Return a fraction of at least 0 and below 1 as a float.

    Raises:
        SettingError: the value is not such a number.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 <= value < 1.0:  # type: ignore[operator]
        raise SettingError(
            f"{name} must be a fraction of at least 0 and below 1, got {printable(repr(value))}"
        )
    return float(value)  # type: ignore[arg-type]


def check_flags(**arguments: object) -> None:
    """Check that arguments are True or False; a string such as "no" would be truthy.

    Raises:
        SettingError: an argument is not a bool.
    """
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise SettingError(f"{name} must be True or False, got {printable(repr(value))}")


def check_strings(**arguments: object) -> None:
    """Check that arguments are strings; None is allowed.

    Raises:
        SettingError: an argument is not a string.
    """
    for name, value in arguments.items():
        if value is not None and not isinstance(value, str):
            raise SettingError(f"{name} must be a string, got {printable(repr(value))}")


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, of any type other than bool."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # also a tensor of several elements
        return False
    return not isinstance(value, bool)
