"""Shows checkers and editors that a constructor takes the fields of an options class."""

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

P = ParamSpec("P")
Init = Callable[..., None]


def takes(options: Callable[P, object]) -> Callable[[Init], Callable[Concatenate[Any, P], None]]:
    """Give an `__init__` the arguments of `options` in the eyes of a checker; it stays as it is.

    Args:
        options: an attrs class whose fields are the arguments.
    """
    return lambda init: init
