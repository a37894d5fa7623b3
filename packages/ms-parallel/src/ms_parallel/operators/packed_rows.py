"""Attention over packed documents on a GPU without a dense attention mask.

The engine computes document boundaries on the host, before a batch reaches the device, so that its
attention does not wait for the device. Shapes: B rows, S positions, Hq and Hk heads, D head width.
"""

from collections.abc import Callable, MutableMapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ms_parallel.torch_private import varlen_attention

if TYPE_CHECKING:  # takes half a second to import, and only a GPU needs it
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Positions per block of FlexAttention's block mask."""
MAX_HEAD_WIDTH = 256
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
    # A row start always begins a document, even with the number of the previous row's last one.
    begins = torch.ones(rows, positions, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero()[:, 0]
    row = starts.div(positions, rounding_mode="floor")
    numbers = documents.flatten()[starts]
    # A repeated (row, number) pair is a document in two pieces.
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
    # All rows as one long row (1, B·S, heads, D), split by document.
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
    """Whether FlashAttention's variable-length kernel supports these tensors."""
    width = q.shape[3]
    return (
        q.device.type == "cuda"
        and q.dtype in (torch.bfloat16, torch.float16)
        and v.shape[3] == width
        and width % 8 == 0
        and width <= MAX_HEAD_WIDTH
    )


_boundaries: MutableMapping[Tensor, tuple[int, PackedRows | None]] = WeakTensorKeyDictionary()
"""Version and boundaries of each `documents` tensor in use; an entry is dropped with its tensor."""


def move_documents(documents: Tensor, device: torch.device) -> Tensor:
    """Copy `documents` to a device, and remember their boundaries for the attention of a GPU."""
    moved = documents.to(device, non_blocking=True)
    if device.type == "cuda" and documents.device.type == "cpu":
        remember_boundaries(moved, documents)
    return moved


def remember_boundaries(documents: Tensor, on_host: Tensor) -> None:
    """Store the boundaries of `documents` on a device, computed from its copy on the host."""
    lengths = packed_lengths(on_host)
    rows = None if lengths is None else PackedRows(lengths, documents.device)
    _boundaries[documents] = (_version(documents), rows)


def boundaries_of(documents: Tensor) -> PackedRows | None:
    """Return the boundaries of `documents`, None if a document is not contiguous.

    Documents whose host copy was not seen by `remember_boundaries`, or that changed since, are read
    from the device once, which waits for it.
    """
    if documents not in _boundaries or _boundaries[documents][0] != _version(documents):
        remember_boundaries(documents, documents.cpu())
    return _boundaries[documents][1]


def _version(documents: Tensor) -> int:
    return 0 if documents.is_inference() else documents._version


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
    # Padding repeats the last document, so block ranges stay tight; `seq_lengths` cuts it off.
    padded = torch.cat((documents, documents[:, -1:].expand(rows, -length % BLOCK)), 1)
    blocks = padded.view(rows, -1, BLOCK)
    low, high = blocks.amin(-1), blocks.amax(-1)  # (B, blocks)
    first = torch.arange(blocks.shape[1], device=documents.device) * BLOCK
    last = first + BLOCK - 1
    nearest = first[:, None] - last  # smallest query-key distance of a pair of blocks
    farthest = last[:, None] - first
    # Ranges may overlap although no number is shared; `visible` masks such blocks elementwise.
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


def _listed(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return int32 counts (B, 1, blocks) and indices (B, 1, blocks, blocks), visible ones first."""
    counts = visible.sum(-1, dtype=torch.int32)[:, None]
    indices = visible.int().argsort(dim=-1, descending=True, stable=True)
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

    def apply_softcap(
        score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor
    ) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score / softcap)

    out = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=None if softcap is None else apply_softcap,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
