"""Keys and values of rows that began at different times, aligned at their newest token.

All rows write their next token into the same column; a row that begins later has its prompt copied
into the columns before it. So a step needs one slice and, where rows differ in length, one mask,
and a row's place can be given to another at once. Rows lie side by side in memory that is made
once; where one goes, the last takes its place and no other is moved.
Shapes: B rows, W columns in use, Hk heads, D width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Columns:
    """A cache for all layers of a model.

    Args:
        capacity: columns to begin with; more are made when they are needed.
        room: rows to begin with; likewise.
    """

    def __init__(self, capacity: int = 128, room: int = 1) -> None:
        self.capacity = capacity
        self.room = room
        self.end = 0
        """The column that the next token goes to."""
        self.starts = torch.zeros(0, dtype=torch.int64)
        """(B,) the first column of each row; on the CPU, which plans where what goes."""
        self.low = 0
        """The first column of any row."""
        self.held: list[Tensor] = []
        """Each layer's (2, room, Hk, capacity, D): keys, then values."""
        self._mask: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows in use, B."""
        return self.starts.shape[0]

    def view(self, layer: int, count: int) -> Tensor:
        """View what a layer holds and the next `count` columns, (2, B, Hk, W + count, D)."""
        return self.held[layer][:, : self.rows, :, self.low : self.end + count]

    def mask(self) -> Tensor | None:
        """Tell which columns the next token sees, (B, W + 1) bool; None where each sees all."""
        if bool((self.starts == self.low).all()):
            return None
        if self._mask is None or self._mask.shape != (self.rows, self.end + 1 - self.low):
            columns = torch.arange(self.low, self.end + 1)
            self._mask = (columns >= self.starts[:, None]).to(self.held[0].device)
        return self._mask

    def advance(self) -> None:
        """Go on to the next column, once every layer has written the one at `end`."""
        self.end += 1

    def ensure(self, count: int) -> None:
        """Make room for `count` more columns: move to the left, or grow."""
        if self.end + count <= self.capacity:
            return
        width = self.end - self.low
        if width + count > self.capacity // 2:
            self._move(2 * (width + count), self.room, to=0)
        else:
            for layer in self.held:
                layer[..., :width, :] = layer[..., self.low : self.end, :].clone()
        self._renumber(-self.low)

    def drop(self, gone: Tensor) -> Tensor:
        """Let rows go.

        Args:
            gone: (B,) bool.

        Returns:
            (n,) int64 on the CPU, which row of before is at each place now.
        """
        gone = gone.cpu()
        kept = (~gone).nonzero()[:, 0]
        index = torch.arange(len(kept))
        index[gone[: len(kept)]] = kept[kept >= len(kept)]
        for to, place in enumerate(index.tolist()):
            if to != place:
                for layer in self.held:
                    used = layer[:, :, :, self.low : self.end]
                    used[:, to] = used[:, place]
        self.starts = self.starts[index]
        self.low = int(self.starts.min()) if len(index) else self.end
        self._mask = None
        return index

    def add(self, layers: Sequence[Tensor], lengths: Tensor, copies: Tensor) -> None:
        """Add rows that have been read.

        Args:
            layers: of each layer (n, P, 2, Hk, D), each row from its first column on.
            lengths: (n,) int64 on the CPU, how many columns of each row count.
            copies: (m,) int64 on the CPU, which of the n rows each new row begins with.
        """
        longest, new = int(lengths.max()), lengths[copies]
        rows = self.rows
        self.ensure(1)  # it may move what there is to the left, so it comes first
        if longest > self.end:
            by = longest - self.end  # only where a prompt is longer than all columns
            self._move(self.capacity + by, self.room, to=self.low + by)
            self._renumber(by)
        if rows + len(copies) > self.room:
            self._move(self.capacity, rows + len(copies), to=self.low)
        for index, layer in enumerate(layers):
            if index == len(self.held):
                shape = (2, self.room, layer.shape[3], self.capacity, layer.shape[4])
                self.held.append(layer.new_zeros(shape))
            held, read = self.held[index], layer.permute(2, 0, 3, 1, 4)  # (2, n, Hk, P, D)
            pairs = zip(copies.tolist(), new.tolist(), strict=True)
            for row, (source, length) in enumerate(pairs, rows):
                held[:, row, :, self.end - length : self.end] = read[:, source, :, :length]
        self.starts = torch.cat((self.starts, self.end - new))
        self.low, self._mask = int(self.starts.min()), None

    def _move(self, capacity: int, room: int, *, to: int) -> None:
        """Move the columns in use into new memory, from column `to` on."""
        width = self.end - self.low
        for index, layer in enumerate(self.held):
            kind, _, heads, _, size = layer.shape
            grown = layer.new_zeros(kind, room, heads, capacity, size)
            used = layer[:, : self.rows, :, self.low : self.end]
            grown[:, : self.rows, :, to : to + width] = used
            self.held[index] = grown
        self.capacity, self.room = capacity, room

    def _renumber(self, by: int) -> None:
        """Add to the numbers of all columns in use, which were moved to the right by so many."""
        self.starts = self.starts + by
        self.end += by
        self.low += by
        self._mask = None
