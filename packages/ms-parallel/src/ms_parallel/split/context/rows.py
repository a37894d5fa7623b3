"""Rows whose positions the processes of the context axis share out, for one forward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ms_parallel.models.spans import document_lengths
from ms_parallel.operators.packed_rows import attend_in_spans
from ms_parallel.split.context.assignment import QueryRange, query_ranges
from ms_parallel.split.context.blocks import Scores
from ms_parallel.split.context.exchange import Spans, gathered, reordered, traded
from ms_parallel.split.context.ring import Meeting, Ring, meetings_of, ring_attention
from ms_parallel.torch_private import unset_fake_temporarily

Operator = Callable[..., Tensor]


@frozen(kw_only=True)
class RowExchange:
    """How attention of positions that are shared out sees whole rows.

    First the processes along `heads` trade positions for heads; then those along `positions` gather
    keys and values, or send them round.
    """

    whole: DeviceMesh
    """All processes of the context axis."""
    heads: DeviceMesh | None
    positions: DeviceMesh | None
    ring: bool
    """Whether keys and values go round."""


class SharedRows:
    """Which positions this process has, and how what it makes of them is put together.

    Args:
        order: (B, S) int64, as in `Assignment`.
        starts: (B, S), as `document_starts` gives them.
        documents: (B, S) int32 or None, on the device.
        exchange: how attention sees whole rows.
    """

    def __init__(
        self, order: Tensor, starts: Tensor, documents: Tensor | None, exchange: RowExchange
    ) -> None:
        device = torch.device(exchange.whole.device_type)
        self.starts, self.documents, self.exchange = starts, documents, exchange
        nodes = 1 if exchange.positions is None else exchange.positions.size()
        self.parts = order.chunk(nodes, 1)
        """Places of each process along `positions`, (B, S / their number)."""
        self.lengths = document_lengths(documents) if nodes == 1 else None
        self.order = order.to(device)
        self.inverse = self.order.argsort(1)
        share = order.shape[1] // exchange.whole.size()
        first = exchange.whole.get_local_rank() * share
        self.own = self.order[:, first : first + share]
        self.met: dict[tuple[int, int | None], list[Meeting]] = {}
        self.pieces: dict[int, Sequence[QueryRange]] = {}

    def mine(self, x: Tensor) -> Tensor:
        """Select this process's positions (B, S/N, ...) from all of them (B or 1, S, ...)."""
        rows = torch.arange(len(self.own), device=self.own.device)[:, None]
        return x.expand(len(self.own), *x.shape[1:])[rows, self.own]

    def whole(self, part: Tensor) -> Tensor:
        """Gather all positions from the parts of all processes; see `RowSplit`."""
        together = gathered(part, self.exchange.whole, summed=False)
        return reordered(together, self.inverse, self.order)

    def attend(
        self, operator: Operator, q: Tensor, k: Tensor, v: Tensor, **settings: Any
    ) -> Tensor:
        """Attend over whole rows; see `RowSplit`."""
        heads = self.exchange.heads
        if heads is None:
            return self._across(operator, q, k, v, settings)
        repeats = _repeats(q.shape[2], k.shape[2], heads.size())
        k, v = (x.repeat_interleave(repeats, 2) if repeats > 1 else x for x in (k, v))
        q, k, v = (traded(x, heads, from_dim=1, to_dim=2) for x in (q, k, v))
        if (sinks := settings.get("sinks")) is not None:
            settings["sinks"] = sinks.chunk(heads.size())[heads.get_local_rank()]
        out = self._across(operator, q, k, v, settings)
        return traded(out, heads, from_dim=2, to_dim=1)

    def _across(
        self, operator: Operator, q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]
    ) -> Tensor:
        """Attend from this process's positions along `positions`."""
        mesh = self.exchange.positions
        if mesh is not None and self.exchange.ring:
            return self._round(q, k, v, mesh, **settings)
        if mesh is not None:
            return self._gathered(operator, q, k, v, mesh, settings)
        if self.lengths is not None:
            return attend_in_spans(operator, q, k, v, self.lengths, **settings)
        return operator(q, k, v, documents=self.documents, **settings)

    def _gathered(
        self,
        operator: Operator,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mesh: DeviceMesh,
        settings: dict[str, Any],
    ) -> Tensor:
        """Gather keys and values of the whole rows, and attend to them from each piece."""
        both = gathered(torch.cat((k, v), 3), mesh, summed=True)
        both = reordered(both, self.inverse, self.order)
        k, v = both[..., : k.shape[3]], both[..., k.shape[3] :]
        pieces = self._pieces(mesh.get_local_rank())
        return attend_in_pieces(operator, q, k, v, pieces, self.documents, **settings)

    def _round(
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
        """Send keys and values round; the operator is not asked, as it gives no logsumexp."""
        here = mesh.get_local_rank()
        return ring_attention(
            q,
            k,
            v,
            sinks,
            Ring(group=mesh.get_group(), index=here, count=mesh.size()),
            lambda source: self._meetings(here, source, window),
            Scores(scale=q.shape[3] ** -0.5 if scale is None else scale, softcap=softcap),
        )

    def _pieces(self, node: int) -> Sequence[QueryRange]:
        """Return the pieces of a process along `positions`."""
        if node not in self.pieces:
            with unset_fake_temporarily():  # numbers of rows are known where memory is predicted
                self.pieces[node] = query_ranges(self.parts[node], self.starts)
        return self.pieces[node]

    def _meetings(self, here: int, source: int, window: int | None) -> list[Meeting]:
        key = source, window
        if key not in self.met:
            theirs, device = self._pieces(source), self.order.device
            with unset_fake_temporarily():
                found = meetings_of(self._pieces(here), theirs, self.starts, window)
            self.met[key] = [each.to(device) for each in found]
        return self.met[key]


def attend_in_pieces(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pieces: Sequence[QueryRange],
    documents: Tensor | None,
    **settings: Any,
) -> Tensor:
    """Attend from each piece of one process to whole rows.

    A piece's queries are the last positions of the keys that it is given, as in a cache, so that
    every operator can do it.

    Args:
        operator: as `ms_parallel.operators.attention`.
        q: (B, S/N, Hq, D) of the process.
        k: (B, S, Hk, D).
        v: (B, S, Hk, Dv).
        pieces: of the process; they cover its positions.
        documents: (B, S) int32 or None.
        settings: what else the operator takes.

    Returns:
        (B, S/N, Hq, Dv).
    """
    lengths = [piece.stop - piece.start for piece in pieces]
    queries = torch.split(q.flatten(0, 1)[None], lengths, 1)
    keys, values = Spans(len(pieces)), Spans(len(pieces))
    made = []
    for piece, own in zip(pieces, queries, strict=True):
        row = slice(piece.row, piece.row + 1)
        seen = row, slice(piece.first_seen(settings.get("window")), piece.stop)
        numbers = documents[seen] if piece.mixed and documents is not None else None
        both = keys.at(k, *seen), values.at(v, *seen)
        made.append(operator(own, *both, documents=numbers, **settings))
    return torch.cat(made, 1).view(*q.shape[:3], v.shape[3])


def _repeats(queries: int, keys: int, count: int) -> int:
    """Return how often key heads are repeated so that `count` processes get equal shares."""
    group = queries // keys
    return next(n for n in range(1, group + 1) if group % n == 0 and keys * n % count == 0)
