"""Checks that a setting passes when it is built; each failure is one clear line."""

import math
import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from attrs import Attribute

from ms_parallel.errors import ConfigError
from ms_parallel.files.untrusted import decoding

__all__ = ["a_path", "check_path", "flag", "nearest", "number", "one_of", "text", "whole"]

Check = Callable[[Any, "Attribute[Any]", Any], None]


MOST = 10**12
"""More than any count of steps, tokens or samples; what is greater is a slip of the hand."""


def check_path(name: str, value: str | os.PathLike[str]) -> None:
    """Refuse what no system takes for a path, before anything is looked for there.

    Raises:
        ConfigError: it is endless, holds a NUL, or its links run in a circle.
    """
    with decoding(f"{name} {os.fspath(value)!r}", error=ConfigError):
        try:
            os.stat(value)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return  # whoever needs it there says so


def a_path(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Something that can be a path; None too."""
    if isinstance(value, str | os.PathLike):
        check_path(attribute.name, value)


def whole(*, least: int = 1, most: int = MOST, optional: bool = False) -> Check:
    """A whole number of at least `least`; None too if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{attribute.name} is {value!r}; give a whole number of at least {least}"
            )
        if value > most:
            raise ConfigError(f"{attribute.name} is above {most}; give a smaller whole number")

    return check


def number(
    *, least: float = 0.0, most: float = math.inf, below: float = math.inf, optional: bool = False
) -> Check:
    """A finite number from `least` to `most`, and less than `below`; None too if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        fits = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and least <= value <= min(most, sys.float_info.max)
            and value < below
        )
        if not fits:
            upper = f" to {most:g}" if most < math.inf else ""
            upper = f" up to, not including, {below:g}" if below < math.inf else upper
            more = "" if upper else " or more"
            raise ConfigError(
                f"{attribute.name} is {value!r}; give a number from {least:g}{upper}{more}"
            )

    return check


def one_of(*choices: str) -> Check:
    """One of a few words."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if value not in choices:
            raise ConfigError(f"{attribute.name} is {value!r}; {nearest(str(value), choices)}")

    return check


def text(*, optional: bool = False) -> Check:
    """A text; None too if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if not (isinstance(value, str) or (optional and value is None)):
            raise ConfigError(f"{attribute.name} is {value!r}; give a text")

    return check


def flag(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} is {value!r}; give true or false")


def nearest(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown word: the nearest known one, or all of them."""
    known = sorted(known)
    lower = {one.lower(): one for one in known}
    near = get_close_matches(word.lower(), lower, n=1, cutoff=0.4)
    return f"did you mean {lower[near[0]]!r}?" if near else f"known: {', '.join(known)}"
