"""Attention over packed documents on a GPU without a dense attention mask.

Document boundaries are computed on the host before a batch reaches the device, so nothing here
synchronizes with the device. Shapes: B rows, S positions, Hq and Hk heads, D head width.
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ms_parallel.torch_private import varlen_attention

if TYPE_CHECKING:  # takes half a second to import, and only a GPU needs it
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Positions per block of FlexAttention's block mask."""
WIDEST_HEAD = 256
"""Widest head of FlashAttention-2."""


def packed_lengths(documents: Tensor) -> tuple[int, ...] | None:
    """Return the lengths of all documents in row order; they sum to B·S.

    Args:
        documents: (B, S) integers on the CPU.

    Returns:
        The lengths, or None if a document number reappears later in its row, so that the document
        is not contiguous.
    """
    rows, positions = documents.shape
    begins = torch.ones(rows, positions, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    row = starts.div(positions, rounding_mode="floor")
    numbers = documents.flatten()[starts]
    if len(set(zip(row.tolist(), numbers.tolist(), strict=True))) != len(starts):
        return None
    ends = torch.cat((starts[1:], starts.new_tensor([rows * positions])))
    return tuple((ends - starts).tolist())


def attend_in_spans(
    attention: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    **settings: Any,
) -> Tensor:
    """Compute attention separately for each document.

    Args:
        attention: an operator like `ms_parallel.operators.attention`.
        q: (B, S, Hq, D).
        k: (B, S, Hk, D).
        v: (B, S, Hk, Dv).
        lengths: document lengths of all rows; they sum to B·S.
        settings: further arguments of the operator.

    Returns:
        (B, S, Hq, Dv).
    """
    parts = (torch.split(x.flatten(0, 1)[None], list(lengths), 1) for x in (q, k, v))
    outputs = [attention(*part, **settings) for part in zip(*parts, strict=True)]
    return torch.cat(outputs, 1).view(*q.shape[:3], v.shape[3])


class PackedRows:
    """Boundaries of packed documents for variable-length kernels.

    Args:
        lengths: document lengths of all rows, in row order.
        device: device of the boundaries.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = tuple(lengths)
        self.longest = max(self.lengths)
        boundaries = torch.tensor((0, *accumulate(self.lengths)), dtype=torch.int32)
        self.boundaries = boundaries.to(device, non_blocking=True)
        """(documents + 1,) int32 cumulative lengths: FlashAttention's `cu_seqlens`."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, scale: float
    ) -> Tensor:
        """Compute attention (B, S, Hq, D) within documents, with FlashAttention."""
        out = varlen_attention(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            self.boundaries,
            self.longest,
            causal=causal,
            window=window,
            scale=scale,
        )
        return out.view(q.shape)


def fits_varlen(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention's variable-length kernel takes these tensors."""
    width = q.shape[3]
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and v.shape[3] == width
        and width % 8 == 0
        and width <= WIDEST_HEAD
    )


class _RecentRows:
    """Cached boundaries of the latest `documents`, shared by all layers of a forward pass.

    Keyed by the tensor object and its version; dropped when the tensor is freed.
    """

    def __init__(self) -> None:
        self._documents: weakref.ref[Tensor] | None = None
        self._version = 0
        self._rows: PackedRows | None = None

    def of(self, documents: Tensor) -> PackedRows | None:
        """Return the boundaries of `documents`; a cache miss copies it from the device."""
        cached = self._documents is not None and self._documents() is documents
        if not cached or self._version != _version(documents):
            self.remember(documents, documents.cpu())
        return self._rows

    def remember(self, documents: Tensor, on_host: Tensor) -> None:
        """Cache the boundaries of `documents`, computed from its host copy."""
        lengths = packed_lengths(on_host)
        self._rows = None if lengths is None else PackedRows(lengths, documents.device)
        self._version = _version(documents)
        self._documents = weakref.ref(documents, self._forget)

    def _forget(self, dropped: "weakref.ref[Tensor]") -> None:
        if self._documents is dropped:
            self._documents = self._rows = None


def _version(documents: Tensor) -> int:
    return 0 if documents.is_inference() else documents._version


recent_rows = _RecentRows()


def block_mask(documents: Tensor, window: int | None = None) -> "BlockMask":
    """Build FlexAttention's causal mask of packed documents from per-block minima and maxima.

    Takes memory for B·(S/128)² numbers and does not synchronize with the device. A pair of query
    and key blocks is empty if the ranges of their document numbers are disjoint or causality or the
    window hides every key. It is full if both blocks are in one document and every key is visible.
    All other blocks are masked elementwise.

    Args:
        documents: (B, S) integers.
        window: sliding window in positions, the query's own included; None for no limit.
    """
    from torch.nn.attention.flex_attention import BlockMask

    rows, length = documents.shape
    padded = torch.cat((documents, documents[:, -1:].expand(rows, -length % BLOCK)), 1)
    blocks = padded.view(rows, -1, BLOCK)
    low, high = blocks.amin(-1), blocks.amax(-1)  # (B, blocks)
    first = torch.arange(blocks.shape[1], device=documents.device) * BLOCK
    last = first + BLOCK - 1
    nearest = first[:, None] - last  # smallest query-key distance of a pair of blocks
    farthest = last[:, None] - first
    overlap = (low[:, :, None] <= high[:, None]) & (high[:, :, None] >= low[:, None])
    some = overlap & (farthest >= 0)
    same = (low == high)[:, :, None] & (low == high)[:, None] & (low[:, :, None] == low[:, None])
    full = same & (nearest >= 0)
    if window is not None:
        some = some & (nearest < window)
        full = full & (farthest < window)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (documents[row, query] == documents[row, key])
        return seen if window is None else seen & (query - key < window)

    return BlockMask.from_kv_blocks(
        *_listed(some & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 counts (B, 1, blocks) and indices (B, 1, blocks, blocks), chosen ones first."""
    counts = chosen.sum(-1, dtype=torch.int32)[:, None]
    indices = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return counts, indices.to(torch.int32)[:, None].contiguous()


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: "BlockMask",
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute attention with FlexAttention and a block mask; call it in compiled code.

    Args:
        q: (B, S, Hq, D).
        k: (B, S, Hk, D).
        v: (B, S, Hk, Dv).
        mask: from `block_mask`.
        scale: factor on the scores; 1/√D by default.
        softcap: soft cap on the scores, softcap · tanh(score / softcap).

    Returns:
        (B, S, Hq, Dv).
    """
    from torch.nn.attention.flex_attention import flex_attention

    def bend(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=None if softcap is None else bend,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
