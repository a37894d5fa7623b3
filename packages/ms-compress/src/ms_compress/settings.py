"""Checks that a setting passes when it is built; each failure is one clear line."""

import math
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from attrs import Attribute

from ms_compress.errors import ConfigError

__all__ = ["flag", "nearest", "number", "one_of", "shown", "text", "whole"]

Check = Callable[[Any, "Attribute[Any]", Any], None]
SHOWN_CHARACTERS = 80
MOST = 2**63 - 1
"""That 64 bits hold."""


def whole(*, least: int = 1, most: int = MOST, optional: bool = False) -> Check:
    """A whole number from `least` to `most`; None too if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            told = most < MOST or (isinstance(value, int) and value > most)
            upper = f" and at most {most}" if told else ""
            raise ConfigError(
                f"{attribute.name} is {shown(value)}; give a whole number of at least"
                f" {least}{upper}"
            )

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
            and abs(value) <= sys.float_info.max  # whole numbers may be larger than any float
            and least <= value <= most
            and value < below
        )
        if not fits:
            upper = f" to {most:g}" if most < math.inf else ""
            upper = f" up to, not including, {below:g}" if below < math.inf else upper
            more = "" if upper else " or more"
            raise ConfigError(
                f"{attribute.name} is {shown(value)}; give a number from {least:g}{upper}{more}"
            )

    return check


def one_of(*choices: str) -> Check:
    """One of a few words."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if value not in choices:
            raise ConfigError(f"{attribute.name} is {shown(value)}; {nearest(str(value), choices)}")

    return check


def text(*, optional: bool = False) -> Check:
    """A text; None too if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if not (isinstance(value, str) or (optional and value is None)):
            raise ConfigError(f"{attribute.name} is {shown(value)}; give a text")

    return check


def shown(value: object) -> str:
    """A value in a message: not endless, though it is a number of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no more than 4,300 digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def flag(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} is {shown(value)}; give true or false")


def nearest(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown word: the nearest known one, or all of them."""
    known = sorted(known)
    lower = {one.lower(): one for one in known}
    near = get_close_matches(word.lower(), lower, n=1, cutoff=0.4)
    return f"did you mean {lower[near[0]]!r}?" if near else f"known: {', '.join(known)}"
