"""System calls without a Python wrapper."""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any


class MissingError(Exception):
    """Feature that this kernel lacks; the text is the feature's name, not a sentence."""


@cache
def libc() -> ctypes.CDLL:
    """Open the C library, with errno preserved."""
    return ctypes.CDLL(None, use_errno=True)


def call(feature: str, function: Callable[..., Any], *arguments: Any) -> int:
    """Call a C function that returns -1 on error.

    Raises:
        MissingError: the call failed; names the feature and the error.
    """
    result = int(function(*arguments))
    if result < 0:
        raise MissingError(f"{feature} ({os.strerror(ctypes.get_errno())})")
    return result
