"""The same on every tensor of a list: what torch's foreach optimizers call."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..signatures import Scalar

__all__ = ["BODIES"]


def _with_scalar(function: Callable[[Tensor, float], Tensor]) -> Callable[..., None]:
    def body(given: list[Tensor], scalar: Scalar, out: list[Tensor]) -> None:
        for one, result in zip(given, out, strict=True):
            result.copy_(function(one, scalar))

    return body


def _with_list(function: Callable[[Tensor, float], Tensor]) -> Callable[..., None]:
    def body(given: list[Tensor], scalars: list[Scalar], out: list[Tensor]) -> None:
        for one, scalar, result in zip(given, scalars, out, strict=True):
            result.copy_(function(one, scalar))

    return body


def addcmul(
    given: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    scalar: Scalar,
    out: list[Tensor],
) -> None:
    """``given + scalar · first · second``."""
    for one, left, right, result in zip(given, first, second, out, strict=True):
        result.copy_(torch.addcmul(one, left, right, value=scalar))


def addcdiv(
    given: list[Tensor],
    above: list[Tensor],
    below: list[Tensor],
    scalar: Scalar,
    out: list[Tensor],
) -> None:
    """``given + scalar · above / below``."""
    for one, left, right, result in zip(given, above, below, out, strict=True):
        result.copy_(torch.addcdiv(one, left, right, value=scalar))


def lerp(given: list[Tensor], other: list[Tensor], weight: Scalar, out: list[Tensor]) -> None:
    """``given + weight · (other - given)``."""
    for one, two, result in zip(given, other, out, strict=True):
        result.copy_(torch.lerp(one, two, weight))


def sqrt(given: list[Tensor], out: list[Tensor]) -> None:
    """Roots."""
    for one, result in zip(given, out, strict=True):
        result.copy_(one.sqrt())


def norm(given: list[Tensor], order: Scalar, out: list[Tensor]) -> None:
    """The norm of each tensor."""
    for one, result in zip(given, out, strict=True):
        result.copy_(torch.linalg.vector_norm(one.float(), order))


def mul(given: list[Tensor], other: list[Tensor], out: list[Tensor]) -> None:
    """Products."""
    for one, two, result in zip(given, other, out, strict=True):
        result.copy_(one * two)


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
