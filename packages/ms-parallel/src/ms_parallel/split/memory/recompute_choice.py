"""What a block may keep for its backward, as settings name it; without torch."""

import re
from typing import TYPE_CHECKING, Any

from ms_parallel.errors import ConfigError
from ms_parallel.settings import nearest, short_repr

if TYPE_CHECKING:
    from attrs import Attribute

Recompute = str | int
"""One of `KINDS`, or the bytes that a rank may keep, such as `"8GiB"`."""
KINDS = ("none", "selective", "attention", "full")
"""Kinds of recomputation, from what recomputes least:

- `none` keeps what torch saves.
- `selective` keeps a block's input and what matrix products and attention make, and recomputes the
  rest: norms, rotations, gates.
- `attention` keeps the input of attention and recomputes all of it, projections too.
- `full` keeps the block's input alone.
"""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)\s*")
_UNITS = {"B": 1}
_UNITS |= {f"{letter}B": 1000 ** (n + 1) for n, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}iB": 1024 ** (n + 1) for n, letter in enumerate("KMGT")}


def budget_bytes(recompute: Recompute) -> int | None:
    """Return the bytes that a rank may keep if `recompute` names them; None if it names a kind."""
    if isinstance(recompute, int):
        return recompute
    found = _SIZE.fullmatch(recompute)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def check_recompute(recompute: Any, name: str = "recompute") -> None:
    """Check that it is a kind, or a number of bytes above zero.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(recompute, str) and recompute in KINDS:
        return
    sized = isinstance(recompute, str | int) and not isinstance(recompute, bool)
    if sized and (budget_bytes(recompute) or 0) > 0:
        return
    advice = nearest(str(recompute), KINDS)
    raise ConfigError(f"{name} is {short_repr(recompute)}; {advice}, or a budget, such as '8GiB'")


def recompute_setting(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Check a setting of this kind."""
    check_recompute(value, attribute.name)
