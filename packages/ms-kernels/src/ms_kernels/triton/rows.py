"""Tensors as rows that a kernel can walk: any stride between rows, 1 within."""

from torch import Tensor

__all__ = ["as_rows", "with_unit_stride"]


def as_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` (..., H) as (N, H), a view where its strides allow one."""
    return with_unit_stride(tensor.reshape(-1, tensor.shape[-1]))


def with_unit_stride(tensor: Tensor) -> Tensor:
    """Return `tensor` itself, or a copy whose last stride is 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
