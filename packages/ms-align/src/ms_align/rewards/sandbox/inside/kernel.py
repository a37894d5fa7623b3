"""Calls of the kernel that Python has no function for."""

import ctypes
import os
from collections.abc import Callable
from functools import cache
from typing import Any


class MissingError(Exception):
    """Something that this kernel does not offer; its text is a name, not a sentence."""


@cache
def libc() -> ctypes.CDLL:
    """Open the C library, with errors kept."""
    return ctypes.CDLL(None, use_errno=True)


def call(what: str, function: Callable[..., Any], *arguments: Any) -> int:
    """Call a function of the C library that answers -1 for an error.

    Raises:
        MissingError: it failed; names `what` and the error.
    """
    result = int(function(*arguments))
    if result < 0:
        raise MissingError(f"{what} ({os.strerror(ctypes.get_errno())})")
    return result
