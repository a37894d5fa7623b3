"""Settings: validators, and the run files that store settings."""

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
