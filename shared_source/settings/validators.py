"""attrs validators for settings; a failure is a ConfigError with a one-line message."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from attrs import Attribute

from ..errors import ConfigError
from ..files.untrusted import check_path

Check = Callable[[Any, "Attribute[Any]", Any], None]
MOST = 10**12
"""Upper limit for counts of steps, tokens or samples; a larger number is a typo."""
SHOWN_CHARACTERS = 200
CUTOFF = 0.65
"""Similarity of a suggestion: 'bf16' finds 'bfloat16' (0.67), 'steps' not 'float_steps' (0.63)."""
WRITTEN_IN_FILES = (str, bool, int, float, bytes, list, tuple, Mapping, date, time)
"""Types of values in a run file."""


def whole(*, least: int = 1, most: int = MOST, optional: bool = False) -> Check:
    """Require an integer from `least` to `most`; None is accepted if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= most:  # type: ignore[operator]
            too_large = is_whole and value > most  # type: ignore[operator]
            upper = f" and at most {most}" if most < MOST or too_large else ""
            got = f"{attribute.name} is {shown(value)}"
            raise ConfigError(f"{got}; give a whole number of at least {least}{upper}")

    return check


def number(
    *, least: float = 0.0, most: float = math.inf, below: float = math.inf, optional: bool = False
) -> Check:
    """Require a finite number from `least` to `most` and less than `below`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        if not (_is_finite(value) and least <= value <= most and value < below):  # type: ignore[operator]
            upper = f" to {most:g}" if most < math.inf else " or more"
            upper = f" up to, not including, {below:g}" if below < math.inf else upper
            got = f"{attribute.name} is {shown(value)}"
            raise ConfigError(f"{got}; give a number from {least:g}{upper}")

    return check


def numbers(*, optional: bool = False) -> Check:
    """Require a table of finite, non-negative numbers; None is accepted if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        if not (
            isinstance(value, Mapping)
            and all(_is_finite(item) and item >= 0 for item in value.values())
        ):
            got = f"{attribute.name} is {shown(value)}"
            raise ConfigError(f"{got}; give a table of numbers, 0 or more")

    return check


def one_of(*choices: str) -> Check:
    """Require one of `choices`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if value not in choices:
            raise ConfigError(f"{attribute.name} is {shown(value)}; {nearest(str(value), choices)}")

    return check


def text(*, optional: bool = False) -> Check:
    """Require a non-empty string; None is accepted if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if not ((isinstance(value, str) and value) or (optional and value is None)):
            raise ConfigError(f"{attribute.name} is {shown(value)}; give a text that is not empty")

    return check


def flag(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} is {shown(value)}; give true or false")


def a_path(
    *,
    optional: bool = False,
    written: Literal["file", "folder"] | None = None,
    several: bool = False,
    objects: bool = False,
) -> Check:
    """Require a valid path, as defined by `check_path`.

    Args:
        optional: accept None.
        written: kind of output that the run writes to the path, if any.
        several: accept a list or table of paths.
        objects: accept any Python object of a type that a run file cannot contain.
    """

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        is_path_or_none = value is None or isinstance(value, os.PathLike)
        if objects and not is_path_or_none and not isinstance(value, WRITTEN_IN_FILES):
            return
        is_collection = several and isinstance(value, Mapping | list | tuple)
        for path in _texts_in(value) if is_collection else [value]:
            check_path(attribute.name, path, error=ConfigError, optional=optional, written=written)

    return check


def as_path(value: Any) -> Any:
    """Convert a string to a path; pass other values on to the check by `a_path`."""
    return Path(value) if isinstance(value, str) and value else value


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown word: the nearest known word, or the full list."""
    known = sorted(known)
    by_lowercase = {choice.lower(): choice for choice in known}
    matches = get_close_matches(word.lower(), by_lowercase, n=1, cutoff=CUTOFF)
    return (
        f"did you mean {by_lowercase[matches[0]]!r}?" if matches else f"known: {', '.join(known)}"
    )


def shown(value: object) -> str:
    """Format a value for a message, with bounded length."""
    if isinstance(value, int) and abs(value) > 10**40:  # Python formats at most 4,300 digits
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _texts_in(value: object) -> Iterator[object]:
    """Yield the strings and paths in nested lists and tables."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping | list | tuple):
            pending += item.values() if isinstance(item, Mapping) else item
        elif isinstance(item, str | os.PathLike):
            yield item


def _is_finite(value: object) -> bool:
    """Return True for a number in the range of float, which a large int may exceed."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
