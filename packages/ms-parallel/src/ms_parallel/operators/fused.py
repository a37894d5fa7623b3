"""Compiles pointwise code on a GPU, where unfused operations are bound by memory traffic."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ms_parallel.operators.cpu import has_no_values
from ms_parallel.torch_private import has_triton

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` at its first call with CUDA tensors; otherwise run it eagerly.

    The first argument of `function` must be a tensor.
    """
    compiled: Callable[P, R] | None = None

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first: Any = args[0]
        assert isinstance(first, Tensor)
        if (
            first.device.type != "cuda"
            or has_no_values(first)
            or torch.compiler.is_compiling()
            or not has_triton()
        ):
            return function(*args, **kwargs)
        compiled = compiled or torch.compile(function)
        return compiled(*args, **kwargs)

    return run
