"""Decorator that gives a constructor the signature of an options class for type checkers."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

P = ParamSpec("P")
Init = Callable[..., None]


def takes(options: Callable[P, object]) -> Callable[[Init], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` the signature of `options` for type checkers; no effect at runtime.

    Args:
        options: attrs class whose fields are the arguments.
    """
    return lambda init: init
