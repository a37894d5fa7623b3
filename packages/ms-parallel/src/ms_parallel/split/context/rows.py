"""Rows whose positions the processes of the context axis share out, for one forward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ms_parallel.split.context.assignment import Piece
from ms_parallel.split.context.exchange import gathered, reordered


class SharedRows:
    """Which positions this process has, and how what it makes of them is put together.

    Args:
        order: (B, S) int64 on the device, as in `Assignment`.
        documents: (B, S) int32 on the device, or None.
        pieces: of this process.
        mesh: the context axis.
    """

    def __init__(
        self,
        order: Tensor,
        documents: Tensor | None,
        pieces: Sequence[Piece],
        mesh: DeviceMesh,
    ) -> None:
        self.order, self.inverse = order, order.argsort(1)
        self.documents = documents
        self.pieces = pieces
        self.mesh = mesh
        share = order.shape[1] // mesh.size()
        first = mesh.get_local_rank() * share
        self.own = order[:, first : first + share]

    def mine(self, x: Tensor) -> Tensor:
        """This process's positions (B, S/N, ...) of all of them (B or 1, S, ...)."""
        rows = torch.arange(len(self.own), device=self.own.device)[:, None]
        return x.expand(len(self.own), *x.shape[1:])[rows, self.own]

    def whole(self, part: Tensor) -> Tensor:
        """All positions of each process's; see `RowSplit`."""
        return reordered(gathered(part, self.mesh, summed=False), self.inverse, self.order)

    def attend(
        self, operator: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **settings: Any
    ) -> Tensor:
        """Gather keys and values of the whole rows, and attend to them from each piece.

        A piece's queries are the last positions of the keys that it is given, as in a cache, so
        that every operator can do it.
        """
        width = k.shape[3]
        both = gathered(torch.cat((k, v), 3), self.mesh, summed=True)
        both = reordered(both, self.inverse, self.order)
        made = []
        for piece in self.pieces:
            row, first = slice(piece.row, piece.row + 1), _first_key(piece, settings.get("window"))
            queries = q[row, piece.offset : piece.offset + piece.stop - piece.start]
            seen = both[row, first : piece.stop]
            keys, values = seen[..., :width], seen[..., width:]
            documents = None
            if piece.mixed and self.documents is not None:
                documents = self.documents[row, first : piece.stop]
            made.append(operator(queries, keys, values, documents=documents, **settings))
        return torch.cat(made, 1).view(*q.shape[:3], v.shape[3])


def _first_key(piece: Piece, window: int | None) -> int:
    """The first place that any query of a piece sees."""
    return piece.first_key if window is None else max(piece.first_key, piece.start - window + 1)
