"""Parts of a contract: tensor arguments, options, cost models, and benchmark sizes."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from attrs import field, frozen
from torch import Tensor

from ms_kernels.contracts.call import FLOATING, INDICES, Dims

Draw = Callable[[tuple[int, ...], Dims, torch.Generator], Tensor]
"""Generates an example CPU tensor from its shape and all sizes of the call."""


def symbols_of(text: str) -> tuple[str, ...]:
    """Split a string of symbols, such as ``"B S H"``."""
    return tuple(text.split())


@frozen(kw_only=True)
class Argument:
    """A tensor argument of an operator."""

    name: str
    """Parameter name in the public function."""
    dims: tuple[str, ...] = field(converter=symbols_of)
    """Symbols of its sizes, written as one string."""
    dtypes: tuple[torch.dtype, ...] = FLOATING
    """Allowed dtypes."""
    like: str | None = None
    """Name of the argument whose dtype it must match."""
    optional: bool = False
    """Whether None may be passed."""
    differentiable: bool = True
    """Whether the operator has a gradient with respect to it."""
    draw: Draw | None = None
    """Generates example values. None: standard normal."""


def indices(name: str, dims: str, draw: Draw) -> Argument:
    """Return an argument of integer indices, such as classes, experts or positions."""
    return Argument(name=name, dims=dims, dtypes=INDICES, differentiable=False, draw=draw)


@frozen(kw_only=True)
class Option:
    """A non-tensor argument of an operator."""

    name: str
    """Parameter name in the public function."""
    default: object
    """Default value."""
    holds: Callable[[Any], bool]
    """Predicate for allowed values."""
    fits: str
    """Allowed values, in words, for error messages."""
    trials: tuple[object, ...] = ()
    """More values to test."""
    kind: Any = field()
    """Python type, for the torch operator's schema. Default: the type of `default`."""

    @kind.default
    def _kind(self) -> Any:
        return type(self.default)


class Work(NamedTuple):
    """Minimum memory traffic and arithmetic of an operator, for its roofline."""

    size_bytes: int
    """Bytes of memory traffic: each input and output once."""
    flops: int
    """Floating-point operations; a fused multiply-add counts as two."""


Cost = Callable[[Dims, int], Work]
"""Minimum work of one pass, from sizes and bytes per element."""


def no_cost(dims: Dims, itemsize: int) -> Work:
    """Return zero work, for a pass that does not exist."""
    return Work(0, 0)


def streaming(dims: str, *, tensors: int, flops: int, weights: int = 0, row_bytes: int = 0) -> Cost:
    """Return the cost of an operator that reads its rows once.

    Args:
        dims: symbols of a row-wise tensor, such as ``"... H"``; the last is the row width.
        tensors: number of tensors of that shape that are read or written.
        flops: operations per element.
        weights: number of vectors of one row's width that are read or written.
        row_bytes: additional bytes per row.
    """
    *leading, width = dims.split()

    def cost(sizes: Mapping[str, int], itemsize: int) -> Work:
        rows = prod(sizes[name] for name in leading)
        elements = rows * sizes[width]
        size_bytes = (tensors * elements + weights * sizes[width]) * itemsize + row_bytes * rows
        return Work(size_bytes, flops * elements)

    return cost


class Ladder(NamedTuple):
    """Series of growing sizes at which a tuner compares implementations."""

    sizes: Mapping[str, int]
    """Fixed sizes; for a growing symbol, its increment."""
    grows: tuple[str, ...]
    """Symbols whose size grows."""


@frozen(kw_only=True)
class Model:
    """Export settings of an operator for the CPU library: float32, default options."""

    free: tuple[str, ...]
    """Symbols that stay dynamic; ``S`` means ``Sq`` and ``Sk``, always equal."""
    sizes: Mapping[str, int] = field(factory=dict)
    """Static sizes that differ from the contract's example."""
