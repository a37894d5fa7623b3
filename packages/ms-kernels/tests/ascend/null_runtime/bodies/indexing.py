"""Looking up, scattering, joining and counting."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..signatures import Scalar

__all__ = ["BODIES"]


def arange(start: Scalar, end: Scalar, step: Scalar, out: Tensor) -> None:
    """Numbers from `start`, `step` apart."""
    out.copy_(torch.arange(start, end, step)[: out.numel()])


def cat(given: list[Tensor], dim: int, out: Tensor) -> None:
    """Tensors joined along `dim`."""
    out.copy_(torch.cat(given, dim))


def stack(given: list[Tensor], dim: int, out: Tensor) -> None:
    """Tensors joined along a new dim."""
    out.copy_(torch.stack(given, dim))


def embedding(table: Tensor, indices: Tensor, out: Tensor) -> None:
    """Rows of a table."""
    out.copy_(table[indices.long()])


def embedding_backward(
    grad: Tensor, indices: Tensor, rows: int, padding: int, by_frequency: bool, out: Tensor
) -> None:
    """The gradient of a table whose rows were looked up."""
    if by_frequency:
        raise ValueError("scaling by frequency has no body here")
    flat = indices.reshape(-1).long()
    slopes = grad.reshape(-1, grad.shape[-1]).float()
    keep = flat != padding
    sums = torch.zeros(rows, grad.shape[-1]).index_add_(0, flat[keep], slopes[keep])
    out.copy_(sums)


def roll(given: Tensor, shifts: list[int], dims: list[int], out: Tensor) -> None:
    """Elements moved along `dims`, the last ones to the front."""
    out.copy_(torch.roll(given, shifts, dims))


def repeat_interleave(given: Tensor, repeats: int, dim: int, size: int, out: Tensor) -> None:
    """Each element as often, one after the other, along `dim`."""
    out.copy_(torch.repeat_interleave(given, repeats, dim, output_size=size))


def gather(given: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    """Elements chosen along `dim`."""
    out.copy_(torch.gather(given, dim, index.long()))


def scatter_add(given: Tensor, dim: int, index: Tensor, source: Tensor, out: Tensor) -> None:
    """`given` with elements of `source` added at places along `dim`."""
    out.copy_(torch.scatter_add(given, dim, index.long(), source))


def scatter_value(
    given: Tensor, dim: int, index: Tensor, value: Scalar, reduce: int, out: Tensor
) -> None:
    """`given` with one value at places along `dim`."""
    if reduce:
        raise ValueError("a scatter that reduces has no body here")
    out.copy_(torch.scatter(given, dim, index.long(), value))


def scatter_value_(given: Tensor, dim: int, index: Tensor, value: Scalar, reduce: int) -> None:
    """One value put at places along `dim`, in place."""
    scatter_value(given, dim, index, value, reduce, given)


def scatter_(given: Tensor, dim: int, index: Tensor, source: Tensor, reduce: int) -> None:
    """Elements of `source` put at places along `dim`, in place."""
    if reduce:
        raise ValueError("a scatter that reduces has no body here")
    given.scatter_(dim, index.long(), source)


def index(given: Tensor, indices: list[Tensor], out: Tensor) -> None:
    """Elements chosen by a list of indices, one a dim; an empty one takes its dim whole."""
    if out.numel():
        chosen = [each.long() if each.numel() else slice(None) for each in indices]
        out.copy_(given[tuple(chosen)])


def index_select(given: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    """Slices chosen along `dim`."""
    out.copy_(torch.index_select(given, dim, index.long()))


def index_add(
    given: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Scalar, out: Tensor
) -> None:
    """`given` with slices of `source`, times alpha, added at places along `dim`."""
    out.copy_(torch.index_add(given, dim, index.long(), source, alpha=alpha))


def sort(
    given: Tensor, stable: bool, dim: int, descending: bool, values: Tensor, indices: Tensor
) -> None:
    """Sorted values and where they stood."""
    ordered = torch.sort(given, dim=dim, descending=bool(descending), stable=True)
    values.copy_(ordered.values)
    indices.copy_(ordered.indices)


def argsort(given: Tensor, dim: int, descending: bool, out: Tensor) -> None:
    """Where sorted values stood."""
    out.copy_(torch.argsort(given, dim=dim, descending=bool(descending), stable=True))


def topk(
    given: Tensor,
    count: int,
    dim: int,
    largest: bool,
    ordered: bool,
    values: Tensor,
    indices: Tensor,
) -> None:
    """The largest or smallest values along `dim`."""
    found = torch.sort(given, dim=dim, descending=bool(largest), stable=True)
    values.copy_(found.values.narrow(dim, 0, count))
    indices.copy_(found.indices.narrow(dim, 0, count))


def topk_v2(
    given: Tensor,
    count: int,
    dim: int,
    largest: bool,
    ordered: bool,
    stable: bool,
    values: Tensor,
    indices: Tensor,
) -> None:
    """The same; among equals the first is taken if `stable`, and so it is here always."""
    topk(given, count, dim, largest, ordered, values, indices)


def pad(x: Tensor, widths: list[int], value: Scalar, out: Tensor) -> None:
    """Widen the last dims by `widths` (before and behind, last dim first) with a number."""
    out.copy_(F.pad(x, widths, value=value))


def triu(given: Tensor, diagonal: int, out: Tensor) -> None:
    """What stands on or above a diagonal."""
    out.copy_(torch.triu(given, diagonal))


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
