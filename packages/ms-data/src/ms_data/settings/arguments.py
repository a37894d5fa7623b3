"""Checks the types and ranges of arguments of public functions; each failure is one clear line."""

import operator

from ms_data.errors import SettingError, printable


def check_counts(**arguments: object) -> None:
    """Check for whole numbers of 1 or more; None stands for no limit and passes.

    Raises:
        SettingError: one is not.
    """
    for name, value in arguments.items():
        if value is not None and not (is_whole(value) and operator.index(value) >= 1):  # type: ignore[arg-type]
            raise SettingError(
                f"{name} must be a whole number, 1 or more, got {printable(repr(value))}"
            )


def check_share(name: str, value: object) -> float:
    """Return a share from 0 to below 1 as a float, whatever number type it is given as.

    Raises:
        SettingError: it is not one.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0.0 <= value < 1.0:  # type: ignore[operator]
        raise SettingError(
            f"{name} must be a share from 0 to below 1, got {printable(repr(value))}"
        )
    return float(value)  # type: ignore[arg-type]


def check_flags(**arguments: object) -> None:
    """Check for True or False: a text such as "no" would count as True.

    Raises:
        SettingError: one is neither.
    """
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise SettingError(f"{name} must be True or False, got {printable(repr(value))}")


def check_texts(**arguments: object) -> None:
    """Check for texts; None passes.

    Raises:
        SettingError: one is something else.
    """
    for name, value in arguments.items():
        if value is not None and not isinstance(value, str):
            raise SettingError(f"{name} must be a text, got {printable(repr(value))}")


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number of any integer type, and not True or False."""
    return hasattr(value, "__index__") and not isinstance(value, bool)
