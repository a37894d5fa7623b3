"""Context-parallel split of the rows of one forward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ms_parallel.host_copy import send
from ms_parallel.models.spans import document_lengths
from ms_parallel.operators.packed_rows import attend_in_spans
from ms_parallel.split.context.assignment import QueryRange, query_ranges
from ms_parallel.split.context.blocks import ScoreFunction
from ms_parallel.split.context.exchange import (
    SharedGradSlices,
    all_gather_positions,
    all_to_all,
    permute_positions,
)
from ms_parallel.split.context.ring import BlockPair, Ring, block_pairs, ring_attention
from ms_parallel.torch_private import unset_fake_temporarily

Operator = Callable[..., Tensor]


@frozen(kw_only=True)
class RowExchange:
    """Communication by which attention covers full rows.

    First the ranks along `heads` trade positions for heads (Ulysses); then those along `positions`
    gather keys and values, or pass them around a ring.
    """

    context: DeviceMesh
    """All ranks of the context axis."""
    heads: DeviceMesh | None
    positions: DeviceMesh | None
    ring: bool
    """Pass keys and values around a ring instead of gathering them."""


class ContextRowSplit:
    """Split of rows over the context axis; implements `RowSplit`.

    Args:
        order: (B, S) int64, as in `Assignment`.
        starts: (B, S), from `document_starts`.
        documents: (B, S) int32 or None, on the device.
        exchange: how attention covers full rows.
    """

    def __init__(
        self, order: Tensor, starts: Tensor, documents: Tensor | None, exchange: RowExchange
    ) -> None:
        device = torch.device(exchange.context.device_type)
        self.starts, self.documents, self.exchange = starts, documents, exchange
        ranks = 1 if exchange.positions is None else exchange.positions.size()
        self.rank_positions = order.chunk(ranks, 1)
        """Row positions of each rank along `positions`, (B, S / ranks)."""
        # Rows that are not split by position can use variable-length attention.
        self.lengths = document_lengths(documents) if ranks == 1 else None
        self.order = send(order, device)
        self.inverse = self.order.argsort(1)
        rows_per_rank = order.shape[1] // exchange.context.size()
        first = exchange.context.get_local_rank() * rows_per_rank
        self.local_positions = self.order[:, first : first + rows_per_rank]  # (B, S/N)
        self.pair_cache: dict[tuple[int, int | None], list[BlockPair]] = {}
        """Block pairs by the keys' rank and the window."""
        self.range_cache: dict[int, Sequence[QueryRange]] = {}
        """Query ranges by rank."""

    def select_local(self, x: Tensor) -> Tensor:
        """Select this process's positions (B, S/N, ...) from the full rows (B or 1, S, ...)."""
        positions = self.local_positions
        rows = torch.arange(len(positions), device=positions.device)[:, None]  # (B, 1)
        return x.expand(len(positions), *x.shape[1:])[rows, positions]

    def gather(self, part: Tensor) -> Tensor:
        """Gather all positions from all ranks, in row order; see `RowSplit`."""
        gathered = all_gather_positions(part, self.exchange.context, sum_grads=False)
        return permute_positions(gathered, self.inverse, self.order)

    def attend(
        self, operator: Operator, q: Tensor, k: Tensor, v: Tensor, **settings: Any
    ) -> Tensor:
        """Attend over full rows; see `RowSplit`."""
        heads = self.exchange.heads
        if heads is None:
            return self._attend_positions(operator, q, k, v, settings)
        repeats = _kv_repeats(q.shape[2], k.shape[2], heads.size())
        k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
        # (B, S/N, H, D) -> (B, S/positions, H/heads, D)
        q, k, v = (all_to_all(x, heads, gather_dim=1, split_dim=2) for x in (q, k, v))
        # Sinks are per query head, so each rank needs those of its heads.
        if (sinks := settings.get("sinks")) is not None:
            settings["sinks"] = sinks.chunk(heads.size())[heads.get_local_rank()]
        out = self._attend_positions(operator, q, k, v, settings)
        return all_to_all(out, heads, gather_dim=2, split_dim=1)

    def _attend_positions(
        self, operator: Operator, q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]
    ) -> Tensor:
        """Attend to full rows that are split along `positions`."""
        mesh = self.exchange.positions
        if mesh is not None and self.exchange.ring:
            return self._attend_ring(q, k, v, mesh, **settings)
        if mesh is not None:
            return self._attend_gathered(operator, q, k, v, mesh, settings)
        if self.lengths is not None:
            return attend_in_spans(operator, q, k, v, self.lengths, **settings)
        return operator(q, k, v, documents=self.documents, **settings)

    def _attend_gathered(
        self,
        operator: Operator,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mesh: DeviceMesh,
        settings: dict[str, Any],
    ) -> Tensor:
        """Gather the keys and values of full rows, and attend from each local range."""
        # One gather for both: (B, S/N, Hk, D + Dv) -> (B, S, Hk, D + Dv), in the order of ranks.
        kv = all_gather_positions(torch.cat((k, v), 3), mesh, sum_grads=True)
        kv = permute_positions(kv, self.inverse, self.order)
        k, v = kv[..., : k.shape[3]], kv[..., k.shape[3] :]
        ranges = self._ranges(mesh.get_local_rank())
        return attend_ranges(operator, q, k, v, ranges, self.documents, **settings)

    def _attend_ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mesh: DeviceMesh,
        *,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend by ring attention, without the operator, which returns no logsumexp."""
        rank = mesh.get_local_rank()
        return ring_attention(
            q,
            k,
            v,
            sinks,
            Ring(group=mesh.get_group(), index=rank, count=mesh.size()),
            lambda source: self._pairs(rank, source, window),
            ScoreFunction(scale=q.shape[3] ** -0.5 if scale is None else scale, softcap=softcap),
        )

    def _ranges(self, rank: int) -> Sequence[QueryRange]:
        """Return the query ranges of a rank along `positions`, cached."""
        if rank not in self.range_cache:
            with unset_fake_temporarily():  # needs real values when memory is predicted
                self.range_cache[rank] = query_ranges(self.rank_positions[rank], self.starts)
        return self.range_cache[rank]

    def _pairs(self, rank: int, source: int, window: int | None) -> list[BlockPair]:
        key = source, window
        if key not in self.pair_cache:
            k_ranges, device = self._ranges(source), self.order.device
            with unset_fake_temporarily():
                pairs = block_pairs(self._ranges(rank), k_ranges, self.starts, window)
            self.pair_cache[key] = [pair.to(device) for pair in pairs]
        return self.pair_cache[key]


def attend_ranges(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Sequence[QueryRange],
    documents: Tensor | None,
    **settings: Any,
) -> Tensor:
    """Attend from each query range of one rank to full rows.

    The queries of a range are the last positions of the keys that they get, as with a KV cache, so
    any causal operator works.

    Args:
        operator: an operator like `ms_parallel.operators.attention`.
        q: (B, S/N, Hq, D) of the rank.
        k: (B, S, Hk, D).
        v: (B, S, Hk, Dv).
        ranges: query ranges that cover the rank's positions in order.
        documents: (B, S) int32 or None.
        settings: further arguments of the operator.

    Returns:
        (B, S/N, Hq, Dv).
    """
    lengths = [r.stop - r.start for r in ranges]
    q_ranges = torch.split(q.flatten(0, 1)[None], lengths, 1)  # each (1, length, Hq, D)
    keys, values = SharedGradSlices(len(ranges)), SharedGradSlices(len(ranges))
    outputs = []
    for r, q_range in zip(ranges, q_ranges, strict=True):
        row = slice(r.row, r.row + 1)
        index = row, slice(r.first_seen(settings.get("window")), r.stop)
        # Without other documents in the range a causal mask suffices.
        numbers = documents[index] if r.mixed and documents is not None else None
        kv = keys.slice(k, *index), values.slice(v, *index)
        outputs.append(operator(q_range, *kv, documents=numbers, **settings))
    return torch.cat(outputs, 1).view(*q.shape[:3], v.shape[3])


def _kv_repeats(q_heads: int, kv_heads: int, count: int) -> int:
    """Return how often to repeat key heads so that `count` ranks get equal numbers."""
    group = q_heads // kv_heads
    return next(n for n in range(1, group + 1) if group % n == 0 and kv_heads * n % count == 0)
