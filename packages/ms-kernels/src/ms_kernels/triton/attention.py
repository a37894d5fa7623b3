"""Attention that never holds the scores: causal, window, documents, grouped queries, a cache."""

import torch
from torch import Tensor

from ms_kernels.library import opaque
from ms_kernels.reference import CONTRACTS
from ms_kernels.triton import configuration
from ms_kernels.triton.launching import blocks, launch
from ms_kernels.triton.rows import empty, wanted_of, with_unit_stride

__all__ = ["attention", "document_ranges"]

LOG2_E = 1.4426950408889634


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the result (B, Sq, Hq, D) and the base-2 log Σ exp2 of the scores (B, Hq, Sq)."""
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    batch, queries, heads, width = q.shape
    result, lse = _fake(q, k, v, documents, causal, window, scale)
    constants = _constants("forward", q)
    factor = (width**-0.5 if scale is None else scale) * LOG2_E
    launch(
        "attention.attention_forward",
        batch * heads * blocks(queries, constants["BM"]),
        q,
        *(q, k, v, *_tables(documents, q, constants, of_keys=False), result, lse),
        *(*_sizes(q, k, v), k.shape[1], factor, _reach(window, k)),
        **_masks(causal, window, documents),
        **constants,
    )
    return result, lse


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    return empty(q), q.new_empty((batch, heads, queries), dtype=torch.float32)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    result: Tensor,
    lse: Tensor,
    wanted: int,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    batch, queries, heads, width = q.shape
    by_queries = _constants("backward_queries", q)
    by_keys = _constants("backward_keys", q)
    tiles = batch * heads * blocks(queries, by_queries["BM"])
    key_tiles = batch * k.shape[2] * blocks(k.shape[1], by_keys["BN"])
    delta, strides = torch.empty_like(lse), grad.stride()[:3]
    shape = queries, heads, width
    only = {name: by_queries[name] for name in ("BM", "BD")}
    launch("attention.attention_delta", tiles, q, result, grad, delta, *shape, *strides, **only)
    grads = empty(q), empty(k), empty(v)
    factor = width**-0.5 if scale is None else scale
    sizes = (*_sizes(q, k, v), *strides, k.shape[1], factor, _reach(window, k))
    for kernel, count, constants, out in (
        ("attention.attention_backward_queries", tiles, by_queries, grads[:1]),
        ("attention.attention_backward_keys", key_tiles, by_keys, grads[1:]),
    ):
        tables = _tables(documents, q, constants, of_keys=len(out) == 2)
        launch(
            kernel,
            count,
            q,
            *(q, k, v, *tables, grad, lse, delta, *out, *sizes),
            **_masks(causal, window, documents),
            **constants,
        )
    found = wanted_of(wanted, grads)
    return found[0], found[1], found[2]


def _reach(window: int | None, keys: Tensor) -> int:
    """Return a window as kernels take it, in 32 bits: one over all keys hides none."""
    return min(window or 0, keys.shape[1])


attention = opaque(
    CONTRACTS["attention"],
    "triton",
    forward=_forward,
    fake=_fake,
    kept={"lse": "B Hq Sq"},
    backward=_backward,
    saves=("q", "k", "v", "documents", "result", "lse"),
)


def _constants(which: str, q: Tensor) -> dict[str, int]:
    return configuration.attention(f"attention_{which}", configuration.place_of(q), q.shape[-1])


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return queries, keys, heads, heads in a group, width, and three strides of each tensor."""
    shape = (q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2], q.shape[3])
    return (*shape, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])


def _masks(causal: bool, window: int | None, documents: Tensor | None) -> dict[str, bool]:
    return {"CAUSAL": causal, "WINDOW": window is not None, "DOCUMENTS": documents is not None}


def _tables(
    documents: Tensor | None, q: Tensor, constants: dict[str, int], *, of_keys: bool
) -> tuple[Tensor, Tensor]:
    """Return the documents and their ranges; any tensor will do where there are none."""
    if documents is None:
        return q, q
    documents = documents.contiguous()
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
