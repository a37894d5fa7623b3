"""Marks functions whose results torch.compile takes as constants of a graph."""

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def known_when_traced(function: Function) -> Function:
    """Mark a function whose result is a constant of the graph in which it is called.

    It is `torch.compiler.assume_constant_result`, which imports torch's compiler to set this one
    mark: a second that importing the package would cost everybody.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
