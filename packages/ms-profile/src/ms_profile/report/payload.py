"""Columns of numbers small enough for a page: bytes shuffled, deflated, in base64.

A million spans' starts and lengths are 8 MB; their high bytes hardly change from one to the next,
so that put byte plane by byte plane they deflate to a third. The page's `data.js` undoes this.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ms_profile.errors import FormatError

LEVEL = 6


class Column(Struct, frozen=True, kw_only=True):
    """Where one column lies in the unpacked bytes, and as what."""

    name: str
    type: str
    """`u1`, `u2` or `u4`: little-endian without sign."""
    offset: int
    length: int


def pack_columns(columns: Mapping[str, NDArray[Any]]) -> tuple[tuple[Column, ...], str]:
    """Pack unsigned columns, each (N,) of any length, into base64 text.

    Raises:
        FormatError: a column holds what 32 bits without sign cannot.
    """
    parts: list[bytes] = []
    table: list[Column] = []
    offset = 0
    for name, values in columns.items():
        narrow = _narrow(name, values)
        width = narrow.dtype.itemsize
        planes = narrow.view(np.uint8).reshape(-1, width).T if len(narrow) else narrow
        parts.append(np.ascontiguousarray(planes).tobytes())
        table.append(Column(name=name, type=f"u{width}", offset=offset, length=len(narrow)))
        offset += len(parts[-1])
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, 9)
    packed = b"".join([packer.compress(part) for part in parts] + [packer.flush()])
    return tuple(table), base64.b64encode(packed).decode()


def _narrow(name: str, values: NDArray[Any]) -> NDArray[Any]:
    top = int(values.max()) if len(values) else 0
    if (len(values) and int(values.min()) < 0) or top >= 1 << 32:
        raise FormatError(f"column {name} holds {top}; it takes 0 to 2**32 - 1")
    return values.astype("<u1" if top < 1 << 8 else "<u2" if top < 1 << 16 else "<u4")
