"""Row views of tensors for kernels: any stride between rows, unit stride within a row."""

from typing import TypeVar

import torch
from torch import Tensor

from ms_kernels.core.plan import absent_grad, needs_grad

Gradients = TypeVar("Gradients", bound=tuple[Tensor, ...])


def as_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` (..., H) as (N, H), a view where its strides allow one."""
    return with_unit_stride(tensor.reshape(-1, tensor.shape[-1]))


def with_unit_stride(tensor: Tensor) -> Tensor:
    """Return `tensor` if its last stride is 1, otherwise a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized contiguous tensor with the shape of `like`."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def needed_grads(grad_mask: int, gradients: Gradients) -> Gradients:
    """Replace gradients that are not needed with empty tensors."""
    return tuple(  # type: ignore[return-value]  # one per gradient
        grad if needs_grad(grad_mask, index) else absent_grad(grad)
        for index, grad in enumerate(gradients)
    )
