"""Sums, means and extremes over dims, softmax and its gradient."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..signatures import DType, Scalar

__all__ = ["BODIES"]


def reduce_sum(x: Tensor, dims: list[int], keep: bool, dtype: DType, out: Tensor) -> None:
    """Sums over `dims`, or over all dims if empty."""
    wide = _wide(x)
    out.copy_(wide.sum(dims or tuple(range(x.ndim)), keepdim=bool(keep)))


def mean(x: Tensor, dims: list[int], keep: bool, dtype: DType, out: Tensor) -> None:
    """Means over `dims`, or over all dims if empty."""
    out.copy_(_wide(x).mean(dims or tuple(range(x.ndim)), keepdim=bool(keep)))


def amax(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Maximum over `dims`."""
    out.copy_(torch.amax(x, dims, keepdim=bool(keep)))


def maximum(x: Tensor, out: Tensor) -> None:
    """Maximum of all elements."""
    out.copy_(x.max())


def minimum(x: Tensor, out: Tensor) -> None:
    """Minimum of all elements."""
    out.copy_(x.min())


def amin(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Minimum over `dims`."""
    out.copy_(torch.amin(x, dims, keepdim=bool(keep)))


def log_sum_exp(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Logarithm of the sum of exponentials over `dims`."""
    out.copy_(torch.logsumexp(_wide(x), dims, keepdim=bool(keep)))


def vector_norm(
    x: Tensor, order: Scalar, dims: list[int], keep: bool, dtype: DType, out: Tensor
) -> None:
    """The norm over `dims`, or over all dims if empty."""
    out.copy_(torch.linalg.vector_norm(_wide(x), order, dims or None, keepdim=bool(keep)))


def softmax(x: Tensor, dim: int, out: Tensor) -> None:
    """Softmax along `dim`."""
    out.copy_(torch.softmax(_wide(x), dim))


def softmax_backward(grad: Tensor, result: Tensor, dim: int, out: Tensor) -> None:
    """The gradient of `softmax`, from its result."""
    grad_out, p = _wide(grad), _wide(result)
    out.copy_(p * (grad_out - (grad_out * p).sum(dim, keepdim=True)))


def log_softmax(x: Tensor, dim: int, out: Tensor) -> None:
    """Log-softmax along `dim`."""
    out.copy_(torch.log_softmax(_wide(x), dim))


def log_softmax_backward(grad: Tensor, result: Tensor, dim: int, out: Tensor) -> None:
    """The gradient of `log_softmax`, from its result."""
    grad_out = _wide(grad)
    out.copy_(grad_out - _wide(result).exp() * grad_out.sum(dim, keepdim=True))


def cumsum(x: Tensor, dim: int, dtype: DType, out: Tensor) -> None:
    """Cumulative sums along `dim`."""
    out.copy_(_wide(x).cumsum(dim))


def all_of(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Logical and over `dims`."""
    result = x.bool()
    for dim in sorted((axis % max(x.ndim, 1) for axis in dims), reverse=True):
        result = result.all(dim, keepdim=bool(keep))
    out.copy_(result)


def any_of(x: Tensor, dims: list[int], keep: bool, out: Tensor) -> None:
    """Logical or over `dims`."""
    result = x.bool()
    for dim in sorted((axis % max(x.ndim, 1) for axis in dims), reverse=True):
        result = result.any(dim, keepdim=bool(keep))
    out.copy_(result)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


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
