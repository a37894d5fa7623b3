# A copy of shared_source/settings/validators.py, made by `nox -s copies`; change it there.
"""Validators of settings, run when an attrs class is built; each failure is one clear line."""

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
"""More than any count of steps, tokens or samples; what is greater is a slip of the hand."""
SHOWN_CHARACTERS = 200
CUTOFF = 0.65
"""Similarity of a suggestion: 'bf16' finds 'bfloat16' (0.67), 'steps' not 'float_steps' (0.63)."""
WRITTEN_IN_FILES = (str, bool, int, float, bytes, list, tuple, Mapping, date, time)
"""What a run file can hold."""


def whole(*, least: int = 1, most: int = MOST, optional: bool = False) -> Check:
    """Check for a whole number from `least` to `most`; None passes if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least <= value <= most:  # type: ignore[operator]
            too_large = is_whole and value > most  # type: ignore[operator]
            upper = f" and at most {most}" if most < MOST or too_large else ""
            given = f"{attribute.name} is {shown(value)}"
            raise ConfigError(f"{given}; give a whole number of at least {least}{upper}")

    return check


def number(
    *, least: float = 0.0, most: float = math.inf, below: float = math.inf, optional: bool = False
) -> Check:
    """Check for a finite number from `least` to `most`, and less than `below`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        if not (_is_finite(value) and least <= value <= most and value < below):  # type: ignore[operator]
            upper = f" to {most:g}" if most < math.inf else " or more"
            upper = f" up to, not including, {below:g}" if below < math.inf else upper
            given = f"{attribute.name} is {shown(value)}"
            raise ConfigError(f"{given}; give a number from {least:g}{upper}")

    return check


def numbers(*, optional: bool = False) -> Check:
    """Check for a table of finite numbers, 0 or more; None passes if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if optional and value is None:
            return
        if not (
            isinstance(value, Mapping)
            and all(_is_finite(one) and one >= 0 for one in value.values())
        ):
            given = f"{attribute.name} is {shown(value)}"
            raise ConfigError(f"{given}; give a table of numbers, 0 or more")

    return check


def one_of(*choices: str) -> Check:
    """Check for one of a few words."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if value not in choices:
            raise ConfigError(f"{attribute.name} is {shown(value)}; {nearest(str(value), choices)}")

    return check


def text(*, optional: bool = False) -> Check:
    """Check for a text that is not empty; None passes if `optional`."""

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        if not ((isinstance(value, str) and value) or (optional and value is None)):
            raise ConfigError(f"{attribute.name} is {shown(value)}; give a text that is not empty")

    return check


def flag(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} is {shown(value)}; give true or false")


def a_path(
    *,
    optional: bool = False,
    written: Literal["file", "folder"] | None = None,
    several: bool = False,
    objects: bool = False,
) -> Check:
    """Check for a text or path that a system takes; `check_path` says what is refused.

    Args:
        optional: None passes.
        written: what the run writes there at its end.
        several: a list or table passes, whose texts are paths.
        objects: Python may give an object instead, which no run file can write.
    """

    def check(instance: object, attribute: "Attribute[Any]", value: object) -> None:
        named = value is None or isinstance(value, os.PathLike)
        if objects and not named and not isinstance(value, WRITTEN_IN_FILES):
            return
        inside = several and isinstance(value, Mapping | list | tuple)
        for path in _texts_in(value) if inside else [value]:
            check_path(attribute.name, path, error=ConfigError, optional=optional, written=written)

    return check


def as_path(value: Any) -> Any:
    """Convert a text to a path, for `a_path` to check; the rest is left for it to refuse."""
    return Path(value) if isinstance(value, str) and value else value


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown word: the nearest known one, or all of them."""
    known = sorted(known)
    lower = {one.lower(): one for one in known}
    near = get_close_matches(word.lower(), lower, n=1, cutoff=CUTOFF)
    return f"did you mean {lower[near[0]]!r}?" if near else f"known: {', '.join(known)}"


def shown(value: object) -> str:
    """Write a value as a message may hold it, of bounded length."""
    if isinstance(value, int) and abs(value) > 10**40:  # Python writes out 4,300 digits at most
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def _texts_in(value: object) -> Iterator[object]:
    """Yield the texts and paths in lists and tables, however deep."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping | list | tuple):
            waiting += one.values() if isinstance(one, Mapping) else one
        elif isinstance(one, str | os.PathLike):
            yield one


def _is_finite(value: object) -> bool:
    """Return whether it is a number that a float holds; a whole number may be too large for one."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return plain and abs(value) <= sys.float_info.max  # type: ignore[arg-type]
