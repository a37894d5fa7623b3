"""Settings: validators, and the run files that store settings."""

from .validators import (
    MAX_COUNT,
    as_path,
    flag,
    integer,
    nearest,
    number,
    numbers,
    one_of,
    short_repr,
    store_url,
    text,
    valid_path,
)

__all__ = [
    "MAX_COUNT",
    "as_path",
    "flag",
    "integer",
    "nearest",
    "number",
    "numbers",
    "one_of",
    "short_repr",
    "store_url",
    "text",
    "valid_path",
]
