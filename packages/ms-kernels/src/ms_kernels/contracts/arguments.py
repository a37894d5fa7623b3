"""The parts of a contract: tensor arguments, options, costs, and sizes to measure at."""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from attrs import field, frozen
from torch import Tensor

from ms_kernels.contracts.call import FLOATING, INDICES, Dims

Draw = Callable[[tuple[int, ...], Dims, torch.Generator], Tensor]
"""Makes an example on the CPU from its shape and all sizes of the call."""


def symbols_of(text: str) -> tuple[str, ...]:
    """Split symbols that are given as one string."""
    return tuple(text.split())


@frozen(kw_only=True)
class Argument:
    """A tensor argument of an operator."""

    name: str
    """Its name in the public function."""
    dims: tuple[str, ...] = field(converter=symbols_of)
    """Symbols of its sizes, given as one string."""
    dtypes: tuple[torch.dtype, ...] = FLOATING
    """Dtypes that fit."""
    like: str | None = None
    """The argument whose dtype it must share."""
    optional: bool = False
    """Whether None may be passed."""
    differentiable: bool = True
    """Whether the operator has a gradient with respect to it."""
    mutated: bool = False
    """Whether the operator writes its result into it; then it returns None."""
    draw: Draw | None = None
    """Makes an example; normal numbers where it is None."""


def indices(name: str, dims: str, draw: Draw) -> Argument:
    """Return an argument of whole numbers that name something: classes, experts, places."""
    return Argument(name=name, dims=dims, dtypes=INDICES, differentiable=False, draw=draw)


@frozen(kw_only=True)
class Option:
    """A plain Python argument of an operator."""

    name: str
    """Its name in the public function."""
    default: object
    """What it is when not given."""
    holds: Callable[[Any], bool]
    """Whether a value is allowed."""
    fits: str
    """The values that are allowed, in words."""
    trials: tuple[object, ...] = ()
    """Other values that proofs should try."""
    kind: Any = field()
    """Its Python type, for torch's schema of an operator; that of the default if left out."""
    changing: bool = False
    """Whether it differs from call to call, as a step does: no decision may depend on it."""

    @kind.default
    def _kind(self) -> Any:
        return type(self.default)


class Work(NamedTuple):
    """The least that an operator must do: its roofline."""

    size_bytes: int
    """Bytes that must cross the memory bus: each input once, each output once."""
    flops: int
    """Floating point operations, a fused multiply-add counted as two."""


Cost = Callable[[Dims, int], Work]
"""The least work of one pass, from sizes and bytes per element."""


def no_cost(dims: Dims, itemsize: int) -> Work:
    """Return no work: there is no such pass."""
    return Work(0, 0)


def streaming(dims: str, *, tensors: int, flops: int, weights: int = 0, row_bytes: int = 0) -> Cost:
    """Return the cost of an operator that passes over its rows once.

    Args:
        dims: symbols of a row-wise tensor, such as ``"... H"``; the last is a row's width.
        tensors: how many of that shape are read or written.
        flops: operations for each element.
        weights: how many tensors of one row's width are read or written.
        row_bytes: bytes for each row besides.
    """
    *leading, width = dims.split()

    def cost(sizes: Mapping[str, int], itemsize: int) -> Work:
        rows = prod(sizes[name] for name in leading)
        elements = rows * sizes[width]
        size_bytes = (tensors * elements + weights * sizes[width]) * itemsize + row_bytes * rows
        return Work(size_bytes, flops * elements)

    return cost


class Ladder(NamedTuple):
    """Sizes at which a tuner compares implementations, small to large."""

    sizes: Mapping[str, int]
    """Sizes that stay; one given for a symbol that grows is its unit."""
    grows: tuple[str, ...]
    """Symbols whose size grows."""


@frozen(kw_only=True)
class Model:
    """An operator as a library for the CPU holds it, at the options' defaults, in float32."""

    free: tuple[str, ...]
    """Symbols of the sizes that are not compiled in; ``S`` stands for ``Sq`` and ``Sk`` alike."""
    sizes: Mapping[str, int] = field(factory=dict)
    """Sizes that are compiled in, where they differ from the contract's example."""
