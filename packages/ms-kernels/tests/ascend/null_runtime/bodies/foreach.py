"""The foreach calls of torch's optimizers: one operation on every tensor of a list."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..signatures import Scalar

__all__ = ["BODIES"]


def _with_scalar(function: Callable[[Tensor, float], Tensor]) -> Callable[..., None]:
    def body(inputs: list[Tensor], scalar: Scalar, out: list[Tensor]) -> None:
        for x, result in zip(inputs, out, strict=True):
            result.copy_(function(x, scalar))

    return body


def _with_list(function: Callable[[Tensor, float], Tensor]) -> Callable[..., None]:
    def body(inputs: list[Tensor], scalars: list[Scalar], out: list[Tensor]) -> None:
        for x, scalar, result in zip(inputs, scalars, out, strict=True):
            result.copy_(function(x, scalar))

    return body


def addcmul(
    inputs: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    scalar: Scalar,
    out: list[Tensor],
) -> None:
    """``inputs + scalar * first * second``."""
    for x, left, right, result in zip(inputs, first, second, out, strict=True):
        result.copy_(torch.addcmul(x, left, right, value=scalar))


def addcdiv(
    inputs: list[Tensor],
    numerators: list[Tensor],
    denominators: list[Tensor],
    scalar: Scalar,
    out: list[Tensor],
) -> None:
    """``inputs + scalar * numerators / denominators``."""
    for x, left, right, result in zip(inputs, numerators, denominators, out, strict=True):
        result.copy_(torch.addcdiv(x, left, right, value=scalar))


def lerp(inputs: list[Tensor], other: list[Tensor], weight: Scalar, out: list[Tensor]) -> None:
    """``inputs + weight * (other - inputs)``."""
    for x, y, result in zip(inputs, other, out, strict=True):
        result.copy_(torch.lerp(x, y, weight))


def sqrt(inputs: list[Tensor], out: list[Tensor]) -> None:
    """Square roots."""
    for x, result in zip(inputs, out, strict=True):
        result.copy_(x.sqrt())


def norm(inputs: list[Tensor], order: Scalar, out: list[Tensor]) -> None:
    """The norm of each tensor."""
    for x, result in zip(inputs, out, strict=True):
        result.copy_(torch.linalg.vector_norm(x.float(), order))


def mul(inputs: list[Tensor], other: list[Tensor], out: list[Tensor]) -> None:
    """Products."""
    for x, y, result in zip(inputs, other, out, strict=True):
        result.copy_(x * y)


BODIES: dict[str, Callable[..., None]] = {
    "aclnnForeachAddScalarV2": _with_scalar(torch.add),
    "aclnnForeachAddcdivScalarV2": addcdiv,
    "aclnnForeachAddcmulScalarV2": addcmul,
    "aclnnForeachDivScalarList": _with_list(torch.true_divide),
    "aclnnForeachLerpScalar": lerp,
    "aclnnForeachMulList": mul,
    "aclnnForeachMulScalarV2": _with_scalar(torch.mul),
    "aclnnForeachNorm": norm,
    "aclnnForeachSqrt": sqrt,
}
