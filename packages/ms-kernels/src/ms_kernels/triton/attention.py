"""Attention that never holds the scores: causal, window, documents, grouped queries, a cache."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ms_kernels.triton import configuration
from ms_kernels.triton.kernels.attention import (
    attention_backward_keys,
    attention_backward_queries,
    attention_delta,
    attention_forward,
)
from ms_kernels.triton.launching import chip_of, launch
from ms_kernels.triton.rows import with_unit_stride

__all__ = ["attention", "document_ranges"]

LOG2_E = 1.4426950408889634


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return ``softmax(q kᵀ · scale + mask) v``."""
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    result: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        with_unit_stride(q), with_unit_stride(k), with_unit_stride(v), documents,
        causal, window, factor,
    )  # fmt: skip
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> Tensor:
        if documents is not None:
            documents = documents.contiguous()
        result, lse = attend(q, k, v, documents, causal, window, scale)
        ctx.save_for_backward(q, k, v, documents, result, lse)
        ctx.options = causal, window, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = differentiate(with_unit_stride(grad), *ctx.saved_tensors, *ctx.options)
        return (*grads, None, None, None, None)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the result (B, Sq, Hq, D) and the base-2 log Σ exp2 of the scores (B, Hq, Sq)."""
    batch, queries, heads, _ = q.shape
    result = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    constants = _constants(configuration.FORWARD, q)
    launch(
        attention_forward,
        batch * heads * -(-queries // constants["BM"]),
        q,
        *(q, k, v, *_documents(documents, q, constants, of_keys=False), result, lse),
        *_sizes(q, k, v),
        *(0 if documents is None else documents.stride(0), scale * LOG2_E, window or 0),
        **_masks(causal, window, documents),
        **constants,
    )
    return result, lse


def differentiate(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    result: Tensor,
    lse: Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    batch, queries, heads, width = q.shape
    delta = torch.empty_like(lse)
    by_queries = _constants(configuration.BACKWARD_QUERIES, q)
    by_keys = _constants(configuration.BACKWARD_KEYS, q)
    tiles = batch * heads * -(-queries // by_queries["BM"])
    key_tiles = batch * k.shape[2] * -(-k.shape[1] // by_keys["BN"])
    strides = grad.stride()[:3]
    only = {name: by_queries[name] for name in ("BM", "BD")}
    launch(attention_delta, tiles, q, result, grad, delta, queries, heads, width, *strides, **only)
    grad_q, grad_k, grad_v = (
        torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v)
    )
    sizes = (*_sizes(q, k, v), *strides, 0 if documents is None else documents.stride(0))
    for kernel, count, constants, out in (
        (attention_backward_queries, tiles, by_queries, (grad_q,)),
        (attention_backward_keys, key_tiles, by_keys, (grad_k, grad_v)),
    ):
        tables = _documents(documents, q, constants, of_keys=len(out) == 2)
        launch(
            kernel,
            count,
            q,
            *(q, k, v, *tables, grad, lse, delta, *out, *sizes, scale, window or 0),
            **_masks(causal, window, documents),
            **constants,
        )
    return grad_q, grad_k, grad_v


def _constants(table: Any, q: Tensor) -> dict[str, int]:
    return configuration.attention(table, chip_of(q.device), q.element_size(), q.shape[-1])


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return queries, keys, heads, heads in a group, width, and three strides of each tensor."""
    shape = (q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2], q.shape[3])
    return (*shape, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])


def _masks(causal: bool, window: int | None, documents: Tensor | None) -> dict[str, bool]:
    return {"CAUSAL": causal, "WINDOW": window is not None, "DOCUMENTS": documents is not None}


def _documents(
    documents: Tensor | None, q: Tensor, constants: dict[str, int], *, of_keys: bool
) -> tuple[Tensor, Tensor]:
    """Return the documents and their ranges; any tensor will do where there are none."""
    if documents is None:
        return q, q
    of, among = document_ranges(documents, q.shape[1], constants["BM"], constants["BN"])
    return documents, (among if of_keys else of)


def document_ranges(
    documents: Tensor, queries: int, query_block: int, key_block: int
) -> tuple[Tensor, Tensor]:
    """Bound which blocks may see each other, from the least and greatest document of each.

    Args:
        documents: (B, Sk).
        queries: Sq, the last of the positions.
        query_block: queries in a block.
        key_block: keys in a block.

    Returns:
        For each block of queries the first and the end block of keys, and for each block of keys
        those of queries: int32 (B, blocks, 2).
    """
    keys = documents.shape[1]
    low, high = _extremes(documents[:, keys - queries :], query_block)
    key_low, key_high = _extremes(documents, key_block)
    touching = (low[:, :, None] <= key_high[:, None]) & (high[:, :, None] >= key_low[:, None])
    return _span(touching), _span(touching.transpose(1, 2))


def _extremes(documents: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest document of each block of positions, (B, blocks)."""
    spare = -documents.shape[1] % block
    if spare:
        documents = torch.cat((documents, documents[:, -1:].expand(-1, spare)), 1)
    blocks = documents.reshape(len(documents), documents.shape[1] // block, block)
    return blocks.amin(-1), blocks.amax(-1)


def _span(touching: Tensor) -> Tensor:
    """Return where the first True of each row stands and where the last ends."""
    count = touching.shape[-1]
    if not touching.numel():
        return touching.new_zeros((*touching.shape[:-1], 2), dtype=torch.int32)
    marks = touching.to(torch.int32)
    first = marks.argmax(-1)
    end = count - marks.flip(-1).argmax(-1)
    end = torch.where(touching.any(-1), end, 0)
    return torch.stack((first, end), -1).to(torch.int32).contiguous()
