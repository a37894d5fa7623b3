"""Ring attention: keys and values go round the processes, each of which sees one part at a time.

No process ever holds the keys of a whole row. While one part is computed with, the next is under
way. In the backward the gradients of keys and values go round with them, and come home at its end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor

from ms_parallel.operators.cpu import widen
from ms_parallel.split.context.assignment import QueryRange
from ms_parallel.split.context.blocks import Scores, attend_part, merge, part_gradients


@frozen(kw_only=True)
class Meeting:
    """Queries of one process and keys of another, of which some see some."""

    row: int
    queries: slice
    """Where they stand among those of their process."""
    keys: slice
    seen: Tensor | None
    """(queries, keys), or None where all see all."""

    def to(self, device: torch.device) -> "Meeting":
        """Return the same with its mask on a device."""
        return self if self.seen is None else evolve(self, seen=self.seen.to(device))


def meetings_of(
    mine: Sequence[QueryRange], theirs: Sequence[QueryRange], starts: Tensor, window: int | None
) -> list[Meeting]:
    """Find which queries of one process see which keys of another.

    Args:
        mine: pieces of the queries' process.
        theirs: pieces of the keys' process.
        starts: (B, S), as `document_starts` gives them, on the CPU.
        window: a query sees its last so many keys.
    """
    found = []
    for query in mine:
        first = query.first_seen(window)
        for key in theirs:
            if key.row != query.row or key.start >= query.stop or key.stop <= first:
                continue
            seen = _seen(query, key, starts[query.row], window)
            if bool(seen.any()):
                found.append(
                    Meeting(
                        row=query.row,
                        queries=_slice(query),
                        keys=_slice(key),
                        seen=None if bool(seen.all()) else seen,
                    )
                )
    return found


def _slice(piece: QueryRange) -> slice:
    return slice(piece.offset, piece.offset + piece.stop - piece.start)


def _seen(query: QueryRange, key: QueryRange, starts: Tensor, window: int | None) -> Tensor:
    queries = torch.arange(query.start, query.stop)[:, None]
    keys = torch.arange(key.start, key.stop)
    seen = (starts[queries] == starts[keys]) & (keys <= queries)
    return seen if window is None else seen & (queries - keys < window)


@frozen(kw_only=True, eq=False)
class Ring:
    """The processes that keys and values go round."""

    group: dist.ProcessGroup
    index: int
    """Index of this process among them."""
    count: int

    def turn(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        """Send to the next, and begin to receive the like from the one before."""
        after = dist.get_global_rank(self.group, (self.index + 1) % self.count)
        before = dist.get_global_rank(self.group, (self.index - 1) % self.count)
        coming = [torch.empty_like(tensor) for tensor in tensors]
        operations = [dist.P2POp(dist.isend, tensor, after, self.group) for tensor in tensors]
        operations += [dist.P2POp(dist.irecv, tensor, before, self.group) for tensor in coming]
        return coming, dist.batch_isend_irecv(operations)

    def source(self, step: int) -> int:
        """Return the process whose keys and values are here at a step."""
        return (self.index - step) % self.count


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    ring: Ring,
    meetings: Callable[[int], Sequence[Meeting]],
    scores: Scores,
) -> Tensor:
    """Attend from this process's queries to all processes' keys, (B, S/N, Hq, Dv).

    Args:
        q: (B, S/N, Hq, D).
        k: (B, S/N, Hk, D).
        v: (B, S/N, Hk, Dv).
        sinks: (Hq,), one more score of each of a head's queries, whose value is zeros; or None.
        ring: the processes.
        meetings: of this process's queries with the keys of a process.
        scores: how they are made.
    """
    made: Tensor = _Ring.apply(q, k, v, sinks, ring, meetings, scores)  # type: ignore[no-untyped-call]
    return made


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ring: Ring,
        meetings: Callable[[int], Sequence[Meeting]],
        scores: Scores,
    ) -> Tensor:
        """Compute the forward of `ring_attention`."""
        width = k.shape[3]
        out = widen(q.new_zeros(*q.shape[:3], v.shape[3]))
        total = out.new_full(out.shape[:3], -torch.inf)
        held = torch.cat((k, v), 3)
        for step in range(ring.count):
            last = step + 1 == ring.count
            (coming,), works = ([held], []) if last else ring.turn([held])
            for each in meetings(ring.source(step)):
                at, keys = (each.row, each.queries), held[each.row, each.keys]
                part = attend_part(scores, q[at], keys[..., :width], keys[..., width:], each.seen)
                merge(out[at], total[at], *part)
            for work in works:
                work.wait()
            held = coming
        if sinks is not None:
            with_sinks = torch.logaddexp(total, sinks.to(total.dtype))
            out *= (total - with_sinks).exp().unsqueeze(-1)
            total = with_sinks
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.ring, ctx.meetings, ctx.scores = ring, meetings, scores
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k, v and the sinks."""
        q, k, v, sinks, out, total = ctx.saved_tensors
        width, gradient = k.shape[3], widen(gradient)
        slope = (gradient * out).sum(-1)
        of_q, held = torch.zeros_like(widen(q)), torch.cat((k, v), 3)
        of_held = torch.zeros_like(widen(held))
        for step in range(ctx.ring.count):
            last = step + 1 == ctx.ring.count
            (coming,), works = ([held], []) if last else ctx.ring.turn([held])
            for each in ctx.meetings(ctx.ring.source(step)):
                at, keys = (each.row, each.queries), held[each.row, each.keys]
                found = part_gradients(
                    ctx.scores,
                    q[at],
                    keys[..., :width],
                    keys[..., width:],
                    each.seen,
                    (gradient[at], total[at], slope[at]),
                )
                of_q[at] += found[0]
                of_held[each.row, each.keys] += torch.cat(found[1:], 2)
            (of_coming,), more = ctx.ring.turn([of_held])
            for work in (*works, *more):
                work.wait()
            held, of_held = coming, of_coming
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks.to(total.dtype) - total).exp() * slope).sum((0, 1)).to(sinks.dtype)
        of_k, of_v = of_held[..., :width].to(k.dtype), of_held[..., width:].to(v.dtype)
        return of_q.to(q.dtype), of_k, of_v, of_sinks, None, None, None
