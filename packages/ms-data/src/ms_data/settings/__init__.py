# A copy of shared_source/settings/__init__.py, made by `nox -s copies`; change it there.
"""Settings: the validators of their values, and the run files that hold them."""

from .validators import (
    MOST,
    a_path,
    as_path,
    flag,
    nearest,
    number,
    numbers,
    one_of,
    shown,
    text,
    whole,
)

__all__ = [
    "MOST",
    "a_path",
    "as_path",
    "flag",
    "nearest",
    "number",
    "numbers",
    "one_of",
    "shown",
    "text",
    "whole",
]
