"""Marks functions whose results torch.compile treats as constants."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def known_when_traced(function: Function) -> Function:
    """Mark a function whose result is a constant of the graph that calls it.

    Same as `torch.compiler.assume_constant_result`, without importing torch's compiler, which
    would add a second to every import of this package.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
