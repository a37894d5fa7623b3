"""Keys and values of rows that began at different times, aligned at their newest token.

All rows write their next token into the same column; a row that begins later has its prompt copied
into the columns before it. So a step needs one slice and, where rows differ in length, one mask,
and a row's place can be given to another at once. Shapes: B rows, W columns in use, Hk heads, D
width of a head.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Columns"]


class Columns:
    """A cache for all layers of a model.

    Args:
        capacity: columns to begin with; more are made when they are needed.
    """

    def __init__(self, capacity: int = 128) -> None:
        self.capacity = capacity
        self.end = 0
        """The column that the next token goes to."""
        self.starts = torch.zeros(0, dtype=torch.int64)
        """(B,) the first column of each row."""
        self.low = 0
        """The first column of any row."""
        self.held: list[Tensor] = []
        """Of each layer (rows, capacity, 2, Hk, D): keys, then values."""
        self._mask: Tensor | None = None

    @property
    def rows(self) -> int:
        """B."""
        return self.starts.shape[0]

    def view(self, layer: int, count: int) -> Tensor:
        """(B, W + count, 2, Hk, D): what a layer holds, and the next `count` columns."""
        return self.held[layer][: self.rows, self.low : self.end + count]

    def mask(self) -> Tensor | None:
        """(B, W + 1) bool: which columns the next token sees; None where each sees all."""
        if bool((self.starts == self.low).all()):
            return None
        if self._mask is None or self._mask.shape != (self.rows, self.end + 1 - self.low):
            columns = torch.arange(self.low, self.end + 1, device=self.starts.device)
            self._mask = columns >= self.starts[:, None]
        return self._mask

    def advance(self) -> None:
        """The column at `end` was written by every layer."""
        self.end += 1

    def ensure(self, count: int) -> None:
        """Make room for `count` more columns: move to the left, or grow."""
        if self.end + count <= self.capacity:
            return
        width = self.end - self.low
        if width + count > self.capacity // 2:
            self.capacity = 2 * (width + count)
            self.held = [self._moved(layer, self.capacity) for layer in self.held]
        else:
            for layer in self.held:
                layer[:, :width] = layer[:, self.low : self.end].clone()
        self.starts -= self.low
        self.end, self.low, self._mask = width, 0, None

    def _moved(self, layer: Tensor, capacity: int) -> Tensor:
        grown = layer.new_zeros(layer.shape[0], capacity, *layer.shape[2:])
        grown[:, : self.end - self.low] = layer[:, self.low : self.end]
        return grown

    def keep(self, index: Tensor) -> None:
        """Keep the rows of `index` (n,) alone, in its order."""
        self.starts = self.starts[index]
        self.held = [layer[index] for layer in self.held]
        self.low = int(self.starts.min()) if len(index) else self.end
        self._mask = None

    def add(self, layers: Sequence[Tensor], lengths: Tensor, copies: Tensor) -> None:
        """Add rows that have been read.

        Args:
            layers: of each layer (n, P, 2, Hk, D), each row from its first column on.
            lengths: (n,) int64 on the CPU, how many columns of each row count.
            copies: (m,) int64, which of the n rows each new row begins with.
        """
        longest, new = int(lengths.max()), lengths[copies]
        self.ensure(1)  # it may move what there is to the left, so it comes first
        if longest > self.end:
            self._shift_right(longest - self.end)
        rows = self.rows
        if not self.held:
            self.held = [layer.new_zeros(0, self.capacity, *layer.shape[2:]) for layer in layers]
        for index, layer in enumerate(layers):
            room = layer.new_zeros(len(copies), self.capacity, *layer.shape[2:])
            for row, (source, length) in enumerate(zip(copies.tolist(), new.tolist(), strict=True)):
                room[row, self.end - length : self.end] = layer[source, :length]
            self.held[index] = torch.cat((self.held[index][:rows], room))
        self.starts = torch.cat((self.starts, self.end - new.to(self.starts.device)))
        self.low, self._mask = int(self.starts.min()), None

    def _shift_right(self, by: int) -> None:
        """Make room on the left; happens only where a later prompt is longer than all columns."""
        grown = self.capacity + by
        moved = []
        for layer in self.held:
            wider = layer.new_zeros(layer.shape[0], grown, *layer.shape[2:])
            wider[:, by : by + self.end] = layer[:, : self.end]
            moved.append(wider)
        self.held, self.capacity = moved, grown
        self.starts += by
        self.end += by
        self.low += by
        self._mask = None
