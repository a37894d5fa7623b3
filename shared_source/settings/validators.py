"""attrs validators for settings; a failure is a ConfigError with a one-line message."""

import math
import os
import re
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
MAX_COUNT = 10**12
"""Upper limit for counts of steps, tokens or samples; a larger number is a typo."""
MAX_CHARACTERS = 200
STORE_URL = re.compile(r"[a-z][a-z0-9+.-]{0,15}://[^\s@?#]{1,2000}")
CUTOFF = 0.65
"""Similarity of a suggestion: 'bf16' finds 'bfloat16' (0.67), 'steps' not 'float_steps' (0.63)."""
FILE_TYPES = (str, bool, int, float, bytes, list, tuple, Mapping, date, time)
"""Types of values in a run file."""


def integer(*, minimum: int = 1, maximum: int = MAX_COUNT, optional: bool = False) -> Check:
    """Require an integer from `minimum` to `maximum`; None is accepted if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not minimum <= value <= maximum:  # type: ignore[operator]
            too_large = is_integer and value > maximum  # type: ignore[operator]
            # The default upper limit is only worth mentioning to those who exceed it.
            upper = f" and at most {maximum}" if maximum < MAX_COUNT or too_large else ""
            raise ConfigError(
                f"{attribute.name} must be an integer of at least {minimum}{upper}, "
                f"got {short_repr(value)}"
            )

    return check


def number(
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
    below: float = math.inf,
    optional: bool = False,
) -> Check:
    """Require a finite number from `minimum` to `maximum` and less than `below`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        in_range = _is_finite(value) and minimum <= value <= maximum and value < below  # type: ignore[operator]
        if not in_range:
            upper = f" and at most {maximum:g}" if maximum < math.inf else ""
            upper = f" and less than {below:g}" if below < math.inf else upper
            raise ConfigError(
                f"{attribute.name} must be a number of at least {minimum:g}{upper}, "
                f"got {short_repr(value)}"
            )

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
            raise ConfigError(
                f"{attribute.name} must be a table of numbers of at least 0, "
                f"got {short_repr(value)}"
            )

    return check


def one_of(*choices: str) -> Check:
    """Require a string from `choices`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if not (isinstance(value, str) and value in choices):
            remedy = nearest(str(value), choices)
            raise ConfigError(f"{attribute.name} is {short_repr(value)}; {remedy}")

    return check


def text(*, optional: bool = False) -> Check:
    """Require a non-empty string; None is accepted if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if not ((isinstance(value, str) and value) or (optional and value is None)):
            raise ConfigError(
                f"{attribute.name} must be a non-empty string, got {short_repr(value)}"
            )

    return check


def flag(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Require a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} must be true or false, got {short_repr(value)}")


def store_url() -> Check:
    """Require None or the URL of a folder in an object store, without credentials."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if value is None:
            return
        if not isinstance(value, str) or not STORE_URL.fullmatch(value):
            shown = without_credentials(value) if isinstance(value, str) else short_repr(value)
            raise ConfigError(
                f"{attribute.name} must be a URL such as s3://bucket/run without user, password and"
                f" query, got {shown}; set credentials in the environment"
            )

    return check


def valid_path(
    *,
    optional: bool = False,
    written: Literal["file", "folder"] | None = None,
    multiple: bool = False,
    objects: bool = False,
) -> Check:
    """Require a valid path, as defined by `check_path`.

    Args:
        optional: accept None.
        written: kind of output that the run writes to the path, if any.
        multiple: accept a list or table of paths.
        objects: accept any Python object of a type that a run file cannot contain.
    """

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        is_path_or_none = value is None or isinstance(value, os.PathLike)
        if objects and not is_path_or_none and not isinstance(value, FILE_TYPES):
            return
        is_collection = multiple and isinstance(value, Mapping | list | tuple)
        for path in _texts_in(value) if is_collection else [value]:
            check_path(attribute.name, path, error=ConfigError, optional=optional, written=written)

    return check


def as_path(value: Any) -> Any:
    """Convert a string to a path; leave other values for `valid_path` to reject."""
    return Path(value) if isinstance(value, str) and value else value


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the remedy for an unknown word: the nearest choice, or the list of choices."""
    choices = sorted(choices)
    by_lowercase = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(word.lower(), by_lowercase, n=1, cutoff=CUTOFF)
    return (
        f"did you mean {by_lowercase[matches[0]]!r}?" if matches else f"known: {', '.join(choices)}"
    )


def without_credentials(url: str) -> str:
    """Format a URL for a message, without user, password and query."""
    return short_repr(re.sub(r"(?<=://)[^/]*@", "", url).partition("?")[0])


def short_repr(value: object) -> str:
    """Format a value for a message, with bounded length."""
    if isinstance(value, int) and abs(value) > 10**40:  # Python formats at most 4,300 digits
        return f"a number of {value.bit_length()} bits"
    text = " ".join(repr(value).splitlines())  # tensors and modules have several
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


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
