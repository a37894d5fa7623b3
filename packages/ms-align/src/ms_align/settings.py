"""Checks that a setting passes when it is built; each failure is one clear line."""

import math
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from attrs import Attribute

from ms_align.errors import ConfigError

__all__ = ["flag", "nearest", "number", "numbers", "one_of", "text", "whole"]

Check = Callable[[Any, "Attribute[Any]", Any], None]


LARGEST = (1 << 63) - 1
"""Of whole numbers; what counts in torch takes no greater one."""


def whole(*, least: int = 1, most: int = LARGEST, optional: bool = False) -> Check:
    """A whole number of at least `least`, at most `most`; None too if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not fits or value > most:  # type: ignore[operator]
            limit = "" if most == LARGEST and not fits else f" and at most {most}"
            given = f"{attribute.name} is {_shown(value)}"
            raise ConfigError(f"{given}; give a whole number of at least {least}{limit}")

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
            and _is_finite(value)
            and least <= value <= most
            and value < below
        )
        if not fits:
            upper = f" to {most:g}" if most < math.inf else ""
            upper = f" up to, not including, {below:g}" if below < math.inf else upper
            more = "" if upper else " or more"
            raise ConfigError(
                f"{attribute.name} is {_shown(value)}; give a number from {least:g}{upper}{more}"
            )

    return check


def numbers(*, optional: bool = False) -> Check:
    """A table of finite numbers, 0 or more; None too if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        if not (isinstance(value, Mapping) and all(_is_amount(one) for one in value.values())):
            raise ConfigError(
                f"{attribute.name} is {_shown(value)}; give a table of numbers, 0 or more"
            )

    return check


def _is_amount(value: object) -> bool:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and _is_finite(value) and value >= 0  # type: ignore[arg-type,operator]


def _shown(value: object) -> str:
    """A value as a message may hold it: of a number with thousands of digits, that it is one."""
    if isinstance(value, int) and abs(value) > 10**40:
        return "a number of more than 40 digits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


def _is_finite(value: float) -> bool:
    """Whether a float holds it: a whole number may be too great for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def one_of(*choices: str) -> Check:
    """One of a few words."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if value not in choices:
            raise ConfigError(
                f"{attribute.name} is {_shown(value)}; {nearest(str(value), choices)}"
            )

    return check


def text(*, optional: bool = False) -> Check:
    """A text that is not empty; None too if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if not ((isinstance(value, str) and value) or (optional and value is None)):
            raise ConfigError(f"{attribute.name} is {_shown(value)}; give a text that is not empty")

    return check


def flag(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} is {_shown(value)}; give true or false")


def nearest(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown word: the nearest known one, or all of them."""
    known = sorted(known)
    lower = {one.lower(): one for one in known}
    near = get_close_matches(word.lower(), lower, n=1, cutoff=0.4)
    return f"did you mean {lower[near[0]]!r}?" if near else f"known: {', '.join(known)}"
