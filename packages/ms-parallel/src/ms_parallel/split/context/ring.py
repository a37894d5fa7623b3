"""Ring attention: keys and values pass around the ranks, one block at a time.

No rank ever holds the keys of a full row. While one block is used, the next is in transfer. In the
backward pass the gradients of keys and values travel with them, and after a full round are back on
the rank that owns them.

Shapes: B rows, S/N local positions, Hq query heads, Hk key heads, D head width, Dv value width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from ms_parallel.host_copy import send
from ms_parallel.operators.cpu import widen
from ms_parallel.split.context.assignment import QueryRange
from ms_parallel.split.context.blocks import (
    ScoreFunction,
    attend_block,
    block_gradients,
    merge_blocks,
)


@frozen(kw_only=True)
class BlockPair:
    """A range of local queries and a range of another rank's keys, at least one pair unmasked."""

    row: int
    queries: slice
    """Offsets among the positions of the queries' rank."""
    keys: slice
    """Offsets among the positions of the keys' rank."""
    mask: Tensor | None
    """(queries, keys), true where attended; None if all are."""

    def to(self, device: torch.device) -> "BlockPair":
        """Move the mask to a device."""
        return self if self.mask is None else evolve(self, mask=send(self.mask, device))


def block_pairs(
    q_ranges: Sequence[QueryRange],
    k_ranges: Sequence[QueryRange],
    starts: Tensor,
    window: int | None,
) -> list[BlockPair]:
    """Return the pairs of ranges in which some query attends to some key.

    Args:
        q_ranges: ranges of the queries' rank.
        k_ranges: ranges of the keys' rank.
        starts: (B, S), from `document_starts`, on the CPU.
        window: number of latest keys that a query attends to; None for all.
    """
    pairs = []
    for query in q_ranges:
        first = query.first_seen(window)
        for key in k_ranges:
            if key.row != query.row or key.start >= query.stop or key.stop <= first:
                continue
            mask = _mask(query, key, starts[query.row], window)
            if bool(mask.any()):
                pairs.append(
                    BlockPair(
                        row=query.row,
                        queries=_local_slice(query),
                        keys=_local_slice(key),
                        mask=None if bool(mask.all()) else mask,
                    )
                )
    return pairs


def _local_slice(positions: QueryRange) -> slice:
    return slice(positions.offset, positions.offset + positions.stop - positions.start)


def _mask(query: QueryRange, key: QueryRange, starts: Tensor, window: int | None) -> Tensor:
    """Return the (queries, keys) mask: same document, causal, within the window."""
    q_pos = torch.arange(query.start, query.stop)[:, None]
    k_pos = torch.arange(key.start, key.stop)
    mask = (starts[q_pos] == starts[k_pos]) & (k_pos <= q_pos)
    return mask if window is None else mask & (q_pos - k_pos < window)


@frozen(kw_only=True, eq=False)
class Ring:
    """Ranks around which keys and values pass."""

    group: dist.ProcessGroup
    index: int
    """Index of this process in the ring."""
    count: int

    def rotate(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        """Start sending tensors to the next rank and receiving the previous rank's tensors.

        Returns:
            The receive buffers, and the transfers to wait for before using them.
        """
        next_rank = dist.get_global_rank(self.group, (self.index + 1) % self.count)
        previous_rank = dist.get_global_rank(self.group, (self.index - 1) % self.count)
        received = [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, next_rank, self.group) for tensor in tensors]
        operations += [
            dist.P2POp(dist.irecv, tensor, previous_rank, self.group) for tensor in received
        ]
        return received, dist.batch_isend_irecv(operations)

    def source(self, step: int) -> int:
        """Return the rank whose keys and values this process holds at a step."""
        return (self.index - step) % self.count


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: Ring,
    pairs: Callable[[int], Sequence[BlockPair]],
    score: ScoreFunction,
) -> Tensor:
    """Attend from local queries to the keys of all ranks, (B, S/N, Hq, Dv).

    Args:
        q: (B, S/N, Hq, D).
        k: (B, S/N, Hk, D).
        v: (B, S/N, Hk, Dv).
        sinks: (Hq,) attention sinks: one extra score per query head, with a value of zero; or None.
        ring: the ranks.
        pairs: returns the block pairs of local queries with the keys of a rank.
        score: score function.
    """
    out: Tensor = _RingAttention.apply(q, k, v, sinks, ring, pairs, score)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ring: Ring,
        pairs: Callable[[int], Sequence[BlockPair]],
        score: ScoreFunction,
    ) -> Tensor:
        """Compute the forward pass of `ring_attention`."""
        head_dim = k.shape[3]
        acc = widen(q.new_zeros(*q.shape[:3], v.shape[3]))  # (B, S/N, Hq, Dv), float32 or float64
        lse = acc.new_full(acc.shape[:3], -torch.inf)  # (B, S/N, Hq)
        kv = torch.cat((k, v), 3)  # one transfer per step instead of two
        for step in range(ring.count):
            last = step + 1 == ring.count
            (next_kv,), works = ([kv], []) if last else ring.rotate([kv])
            for pair in pairs(ring.source(step)):
                q_index, block = (pair.row, pair.queries), kv[pair.row, pair.keys]
                k_block, v_block = block[..., :head_dim], block[..., head_dim:]
                part = attend_block(score, q[q_index], k_block, v_block, pair.mask)
                merge_blocks(acc[q_index], lse[q_index], *part)
            for work in works:
                work.wait()
            kv = next_kv
        if sinks is not None:
            # A sink adds e^sink to the denominator and nothing to the numerator.
            lse_with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
            acc *= (lse - lse_with_sinks).exp().unsqueeze(-1)
            lse = lse_with_sinks
        ctx.save_for_backward(q, k, v, sinks, acc, lse)
        ctx.ring, ctx.pairs, ctx.score = ring, pairs, score
        return acc.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k, v and the sinks."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        head_dim, do = k.shape[3], widen(gradient)
        # delta = rowsum(dO * O), as in FlashAttention.
        delta = (do * out).sum(-1)  # (B, S/N, Hq)
        dq, kv = torch.zeros_like(widen(q)), torch.cat((k, v), 3)
        dkv = torch.zeros_like(widen(kv))
        for step in range(ctx.ring.count):
            last = step + 1 == ctx.ring.count
            (next_kv,), works = ([kv], []) if last else ctx.ring.rotate([kv])
            for pair in ctx.pairs(ctx.ring.source(step)):
                q_index, block = (pair.row, pair.queries), kv[pair.row, pair.keys]
                grads = block_gradients(
                    ctx.score,
                    q[q_index],
                    block[..., :head_dim],
                    block[..., head_dim:],
                    pair.mask,
                    (do[q_index], lse[q_index], delta[q_index]),
                )
                dq[q_index] += grads[0]
                dkv[pair.row, pair.keys] += torch.cat(grads[1:], 2)
            # Rotated after every step, the last included: N rotations return dkv to its owner.
            (next_dkv,), grad_works = ctx.ring.rotate([dkv])
            for work in (*works, *grad_works):
                work.wait()
            kv, dkv = next_kv, next_dkv
        dsinks = None
        if sinks is not None:
            # A sink's value is zero, so its score has the gradient -p_sink * delta.
            dsinks = -((sinks.to(lse.dtype) - lse).exp() * delta).sum((0, 1)).to(sinks.dtype)
        dk, dv = dkv[..., :head_dim].to(k.dtype), dkv[..., head_dim:].to(v.dtype)
        return dq.to(q.dtype), dk, dv, dsinks, None, None, None
