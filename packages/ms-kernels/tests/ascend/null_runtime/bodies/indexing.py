"""Lookup, scatter, concatenation, sorting and ranges."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..signatures import Scalar

__all__ = ["BODIES"]


def arange(start: Scalar, end: Scalar, step: Scalar, out: Tensor) -> None:
    """Numbers from `start` in steps of `step`."""
    out.copy_(torch.arange(start, end, step)[: out.numel()])


def cat(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    """Tensors concatenated along `dim`."""
    out.copy_(torch.cat(tensors, dim))


def stack(tensors: list[Tensor], dim: int, out: Tensor) -> None:
    """Tensors stacked along a new dim."""
    out.copy_(torch.stack(tensors, dim))


def embedding(table: Tensor, indices: Tensor, out: Tensor) -> None:
    """Rows of a table."""
    out.copy_(table[indices.long()])


def embedding_backward(
    grad: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool, out: Tensor
) -> None:
    """The gradient of an embedding table."""
    if by_frequency:
        raise ValueError("scaling by frequency is not implemented")
    flat = indices.reshape(-1).long()
    grads = grad.reshape(-1, grad.shape[-1]).float()
    keep = flat != padding
    sums = torch.zeros(rows, grad.shape[-1]).index_add_(0, flat[keep], grads[keep])
    out.copy_(sums)


def roll(x: Tensor, shifts: list[int], dims: list[int], out: Tensor) -> None:
    """Elements shifted cyclically along `dims`."""
    out.copy_(torch.roll(x, shifts, dims))


def repeat_interleave(x: Tensor, repeats: int, dim: int, size: int, out: Tensor) -> None:
    """Each element repeated `repeats` times along `dim`."""
    out.copy_(torch.repeat_interleave(x, repeats, dim, output_size=size))


def gather(x: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    """Elements selected along `dim`."""
    out.copy_(torch.gather(x, dim, index.long()))


def scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor, out: Tensor) -> None:
    """`x` with elements of `source` added at indices along `dim`."""
    out.copy_(torch.scatter_add(x, dim, index.long(), source))


def scatter_value(
    x: Tensor, dim: int, index: Tensor, value: Scalar, reduce: int, out: Tensor
) -> None:
    """`x` with one value at indices along `dim`."""
    if reduce:
        raise ValueError("a reducing scatter is not implemented")
    out.copy_(torch.scatter(x, dim, index.long(), value))


def scatter_value_(x: Tensor, dim: int, index: Tensor, value: Scalar, reduce: int) -> None:
    """Write one value at indices along `dim`, in place."""
    scatter_value(x, dim, index, value, reduce, x)


def scatter_(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: int) -> None:
    """Write elements of `source` at indices along `dim`, in place."""
    if reduce:
        raise ValueError("a reducing scatter is not implemented")
    x.scatter_(dim, index.long(), source)


def index(x: Tensor, indices: list[Tensor], out: Tensor) -> None:
    """Advanced indexing with one index tensor per dim; an empty one selects its full dim."""
    if out.numel():
        selectors = [
            positions.long() if positions.numel() else slice(None) for positions in indices
        ]
        out.copy_(x[tuple(selectors)])


def index_select(x: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    """Slices selected along `dim`."""
    out.copy_(torch.index_select(x, dim, index.long()))


def index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Scalar, out: Tensor
) -> None:
    """`x` with slices of `source`, times alpha, added at indices along `dim`."""
    out.copy_(torch.index_add(x, dim, index.long(), source, alpha=alpha))


def sort(
    x: Tensor, stable: bool, dim: int, descending: bool, values: Tensor, indices: Tensor
) -> None:
    """Sorted values and their original indices."""
    ordered = torch.sort(x, dim=dim, descending=bool(descending), stable=True)
    values.copy_(ordered.values)
    indices.copy_(ordered.indices)


def argsort(x: Tensor, dim: int, descending: bool, out: Tensor) -> None:
    """Original indices of the sorted values."""
    out.copy_(torch.argsort(x, dim=dim, descending=bool(descending), stable=True))


def topk(
    x: Tensor,
    count: int,
    dim: int,
    largest: bool,
    ordered: bool,
    values: Tensor,
    indices: Tensor,
) -> None:
    """The largest or smallest values along `dim`."""
    result = torch.sort(x, dim=dim, descending=bool(largest), stable=True)
    values.copy_(result.values.narrow(dim, 0, count))
    indices.copy_(result.indices.narrow(dim, 0, count))


def topk_v2(
    x: Tensor,
    count: int,
    dim: int,
    largest: bool,
    ordered: bool,
    stable: bool,
    values: Tensor,
    indices: Tensor,
) -> None:
    """The same; ties always go to the first element here, as with `stable`."""
    topk(x, count, dim, largest, ordered, values, indices)


def pad(x: Tensor, widths: list[int], value: Scalar, out: Tensor) -> None:
    """Pad the last dims by `widths` (before and after, last dim first) with a number."""
    out.copy_(F.pad(x, widths, value=value))


def triu(x: Tensor, diagonal: int, out: Tensor) -> None:
    """Elements on and above a diagonal."""
    out.copy_(torch.triu(x, diagonal))


BODIES: dict[str, Callable[..., None]] = {
    "aclnnArange": arange,
    "aclnnArgsort": argsort,
    "aclnnConstantPadNd": pad,
    "aclnnCat": cat,
    "aclnnEmbedding": embedding,
    "aclnnEmbeddingDenseBackward": embedding_backward,
    "aclnnGather": gather,
    "aclnnIndex": index,
    "aclnnIndexAdd": index_add,
    "aclnnIndexSelect": index_select,
    "aclnnInplaceScatter": scatter_,
    "aclnnInplaceScatterValue": scatter_value_,
    "aclnnRepeatInterleaveIntWithDim": repeat_interleave,
    "aclnnRoll": roll,
    "aclnnScatterAdd": scatter_add,
    "aclnnScatterValue": scatter_value,
    "aclnnSort": sort,
    "aclnnStack": stack,
    "aclnnTopk": topk,
    "aclnnTopkV2": topk_v2,
    "aclnnTriu": triu,
}
