"""KV cache for continuous batching, with all rows aligned at their newest token.

All rows write their next token into the same column; a prompt that joins later is copied into the
columns before it. A decoding step therefore needs one slice and, if row lengths differ, one mask,
and a finished row can be replaced immediately. Rows are contiguous in preallocated memory; when one
is dropped, a row from the end moves into its slot and no other row moves.
Shapes: B rows, W columns in use, Hk KV heads, D head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Columns:
    """KV cache of all layers.

    Args:
        capacity: initial number of columns; grows when needed.
        max_rows: initial number of rows; grows when needed.
    """

    def __init__(self, capacity: int = 128, max_rows: int = 1) -> None:
        self.capacity = capacity
        self.max_rows = max_rows
        self.end = 0
        """Column of the next token."""
        self.starts = torch.zeros(0, dtype=torch.int64)
        """(B,) first column of each row; on the CPU, where copies are planned."""
        self.first = 0
        """First column in use by any row."""
        self.layers: list[Tensor] = []
        """Per layer (2, max_rows, Hk, capacity, D): keys, then values."""
        self._offsets: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows in use, B."""
        return self.starts.shape[0]

    def view(self, layer: int, count: int) -> Tensor:
        """Return a view of a layer's columns and the next `count`, (2, B, Hk, W + count, D)."""
        return self.layers[layer][:, : self.rows, :, self.first : self.end + count]

    def mask(self) -> Tensor | None:
        """Return the columns that the next token attends to, (B, W + 1) bool; None for all."""
        if bool((self.starts == self.first).all()):
            return None
        offsets = self.offsets()
        columns = torch.arange(self.end + 1 - self.first, device=offsets.device)
        return columns >= offsets[:, None]

    def offsets(self) -> Tensor:
        """Return the first column of each row, (B,) int64 from the first in use; on the device."""
        # Copied only when rows change, not at every token: each copy waits for the device.
        if self._offsets is None:
            self._offsets = (self.starts - self.first).to(self.layers[0].device)
        return self._offsets

    def advance(self) -> None:
        """Move to the next column, after all layers have written column `end`."""
        self.end += 1

    def ensure(self, count: int) -> None:
        """Make room for `count` more columns, by shifting to the left or growing."""
        if self.end + count <= self.capacity:
            return
        width = self.end - self.first
        # Shift only if that frees half of the memory, so that its cost is amortized.
        if width + count > self.capacity // 2:
            self._reallocate(2 * (width + count), self.max_rows, start=0)
        else:
            for layer in self.layers:
                layer[..., :width, :] = layer[..., self.first : self.end, :].clone()
        self._shift(-self.first)

    def drop(self, finished: Tensor) -> Tensor:
        """Remove rows.

        Args:
            finished: (B,) bool.

        Returns:
            (n,) int64 on the CPU, the previous index of each remaining row.
        """
        finished = finished.cpu()
        remaining = (~finished).nonzero()[:, 0]
        # Rows that already are among the first n stay; the others fill the gaps.
        index = torch.arange(len(remaining))
        index[finished[: len(remaining)]] = remaining[remaining >= len(remaining)]
        # At most the number of dropped rows is copied.
        for target, source in enumerate(index.tolist()):
            if target != source:
                for layer in self.layers:
                    used = layer[:, :, :, self.first : self.end]
                    used[:, target] = used[:, source]
        self.starts = self.starts[index]
        self.first = int(self.starts.min()) if len(index) else self.end
        self._offsets = None
        return index

    def add(self, layers: Sequence[Tensor], lengths: Tensor, copies: Tensor) -> None:
        """Add rows after their prefill.

        Args:
            layers: keys and values per layer, (n, P, 2, Hk, D).
            lengths: (n,) int64 on the CPU, prompt length of each prefilled row.
            copies: (m,) int64 on the CPU, for each new row, the index of its prompt among the n
                rows.
        """
        # A prompt ends in column `end` - 1, like the rows that are already decoding.
        longest, new_lengths = int(lengths.max()), lengths[copies]
        rows = self.rows
        self.ensure(1)  # first, as it may shift the columns in use
        if longest > self.end:
            shift = longest - self.end  # only if a prompt is longer than all columns before `end`
            self._reallocate(self.capacity + shift, self.max_rows, start=self.first + shift)
            self._shift(shift)
        if rows + len(copies) > self.max_rows:
            self._reallocate(self.capacity, rows + len(copies), start=self.first)
        for index, layer in enumerate(layers):
            if index == len(self.layers):
                shape = (2, self.max_rows, layer.shape[3], self.capacity, layer.shape[4])
                self.layers.append(layer.new_zeros(shape))
            cache, prompt = self.layers[index], layer.permute(2, 0, 3, 1, 4)  # (2, n, Hk, P, D)
            pairs = zip(copies.tolist(), new_lengths.tolist(), strict=True)
            for row, (source, length) in enumerate(pairs, rows):
                cache[:, row, :, self.end - length : self.end] = prompt[:, source, :, :length]
        self.starts = torch.cat((self.starts, self.end - new_lengths))
        self.first, self._offsets = int(self.starts.min()), None

    def _reallocate(self, capacity: int, max_rows: int, *, start: int) -> None:
        """Copy the columns in use to new memory, starting at column `start`."""
        width = self.end - self.first
        for index, layer in enumerate(self.layers):
            pair, _, heads, _, head_dim = layer.shape
            grown = layer.new_zeros(pair, max_rows, heads, capacity, head_dim)
            used = layer[:, : self.rows, :, self.first : self.end]
            grown[:, : self.rows, :, start : start + width] = used
            self.layers[index] = grown
        self.capacity, self.max_rows = capacity, max_rows

    def _shift(self, offset: int) -> None:
        """Add an offset to all column indices, after the columns have moved by it."""
        self.starts = self.starts + offset
        self.end += offset
        self.first += offset
