"""Sums, means and extremes over dims, softmax and what comes back from it."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..signatures import DType, Scalar

__all__ = ["BODIES"]


def reduce_sum(given: Tensor, dims: list[int], keep: bool, dtype: DType, out: Tensor) -> None:
    """Sums over `dims`, over all of them if there are none."""
    wide = _wide(given)
    out.copy_(wide.sum(dims or tuple(range(given.ndim)), keepdim=bool(keep)))


def mean(given: Tensor, dims: list[int], keep: bool, dtype: DType, out: Tensor) -> None:
    """Means over `dims`, over all of them if there are none."""
    out.copy_(_wide(given).mean(dims or tuple(range(given.ndim)), keepdim=bool(keep)))


def amax(given: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Largest over `dims`."""
    out.copy_(torch.amax(given, dims, keepdim=bool(keep)))


def maximum(given: Tensor, out: Tensor) -> None:
    """Largest of all."""
    out.copy_(given.max())


def minimum(given: Tensor, out: Tensor) -> None:
    """Smallest of all."""
    out.copy_(given.min())


def amin(given: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Smallest over `dims`."""
    out.copy_(torch.amin(given, dims, keepdim=bool(keep)))


def log_sum_exp(given: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Logarithm of the sum of exponentials over `dims`."""
    out.copy_(torch.logsumexp(_wide(given), dims, keepdim=bool(keep)))


def vector_norm(
    given: Tensor, order: Scalar, dims: list[int], keep: bool, dtype: DType, out: Tensor
) -> None:
    """The norm over `dims`, over all of them if there are none."""
    out.copy_(torch.linalg.vector_norm(_wide(given), order, dims or None, keepdim=bool(keep)))


def softmax(given: Tensor, dim: int, out: Tensor) -> None:
    """Shares along `dim`."""
    out.copy_(torch.softmax(_wide(given), dim))


def softmax_backward(grad: Tensor, result: Tensor, dim: int, out: Tensor) -> None:
    """The gradient of `softmax`, from its result."""
    slope, shares = _wide(grad), _wide(result)
    out.copy_(shares * (slope - (slope * shares).sum(dim, keepdim=True)))


def log_softmax(given: Tensor, dim: int, out: Tensor) -> None:
    """Logarithms of the shares along `dim`."""
    out.copy_(torch.log_softmax(_wide(given), dim))


def log_softmax_backward(grad: Tensor, result: Tensor, dim: int, out: Tensor) -> None:
    """The gradient of `log_softmax`, from its result."""
    slope = _wide(grad)
    out.copy_(slope - _wide(result).exp() * slope.sum(dim, keepdim=True))


def cumsum(given: Tensor, dim: int, dtype: DType, out: Tensor) -> None:
    """Running sums along `dim`."""
    out.copy_(_wide(given).cumsum(dim))


def all_of(given: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Whether all are set over `dims`."""
    kept = given.bool()
    for dim in sorted((each % max(given.ndim, 1) for each in dims), reverse=True):
        kept = kept.all(dim, keepdim=bool(keep))
    out.copy_(kept)


def any_of(given: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Whether any is set over `dims`."""
    kept = given.bool()
    for dim in sorted((each % max(given.ndim, 1) for each in dims), reverse=True):
        kept = kept.any(dim, keepdim=bool(keep))
    out.copy_(kept)


def _wide(given: Tensor) -> Tensor:
    return given.float() if given.dtype in (torch.float16, torch.bfloat16) else given


BODIES: dict[str, Callable[..., None]] = {
    "aclnnAll": all_of,
    "aclnnAmax": amax,
    "aclnnAmin": amin,
    "aclnnAny": any_of,
    "aclnnCumsum": cumsum,
    "aclnnLinalgVectorNorm": vector_norm,
    "aclnnLogSoftmax": log_softmax,
    "aclnnLogSoftmaxBackward": log_softmax_backward,
    "aclnnLogSumExp": log_sum_exp,
    "aclnnMax": maximum,
    "aclnnMean": mean,
    "aclnnMin": minimum,
    "aclnnReduceSum": reduce_sum,
    "aclnnSoftmax": softmax,
    "aclnnSoftmaxBackward": softmax_backward,
}
