"""Key-value cache for generation."""

from collections.abc import Callable

import torch
from torch import Tensor

from ms_parallel.errors import ModelError


class KeyValueCache:
    """Key-value cache of all layers of a stage; grows with every forward pass.

    During a forward pass every layer calls `append` at the same offset; afterward the model calls
    `advance`.
    """

    attend: Callable[..., Tensor] | None = None
    """Attention of new queries (B, S, Hq, D) to the layer appended last, for caches that do it
    themselves, with the keyword arguments window, scale, sinks and softcap. None: the model attends
    to what `append` returns."""

    def __init__(self) -> None:
        self.length = 0
        """Cached positions after the last complete forward pass."""
        self.documents: Tensor | None = None
        """(B, length) int32, if any forward pass had documents."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values.

        Args:
            layer: Global layer index.
            k: (B, S, heads, D).
            v: (B, S, heads, D).

        Returns:
            All keys and values, (B, length + S, heads, D) each, as views.
        """
        end = self.length + k.shape[1]
        buffers = self._layers.get(layer)
        # Doubling makes the copies linear in the final length.
        if buffers is None or buffers[0].shape[1] < end:
            buffers = self._grow(buffers, k, v, max(64, 2 * end))
            self._layers[layer] = buffers
        keys, values = buffers
        # Generation has no backward, and the buffers must not hold a graph.
        keys[:, self.length : end] = k.detach()
        values[:, self.length : end] = v.detach()
        return keys[:, :end], values[:, :end]

    def _grow(
        self, buffers: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor]:
        larger = tuple(x.new_empty(x.shape[0], capacity, *x.shape[2:]) for x in (k, v))
        if buffers is not None:
            for new, old in zip(larger, buffers, strict=True):
                new[:, : self.length] = old[:, : self.length]
        return larger[0], larger[1]

    def all_documents(self, new: Tensor | None, rows: int, count: int) -> Tensor | None:
        """Concatenate the documents of cached and new positions.

        Args:
            new: (B, count) int32 of the new positions; None continues each row's last document.
            rows: Number of rows B.
            count: Number of new positions.

        Returns:
            (B, length + count), or None if no forward pass had documents.
        """
        if new is None:
            if self.documents is None:
                return None
            new = self.documents[:, -1:].expand(rows, count)
        cached = self.documents
        # Positions cached without documents count as document 0.
        if cached is None:
            cached = new.new_zeros(rows, self.length)
        return torch.cat((cached, new), 1)

    def advance(self, count: int, documents: Tensor | None) -> None:
        """Add `count` positions to the length; `documents` comes from `all_documents`."""
        self.length += count
        self.documents = documents

    def rewind(self, length: int) -> None:
        """Drop all positions from `length` on.

        Raises:
            ModelError: the cache is shorter than `length`.
        """
        if not 0 <= length <= self.length:
            raise ModelError(f"cannot rewind a cache of {self.length} positions to {length}")
        # The buffers keep their bytes; the next `append` overwrites them.
        self.length = length
        if self.documents is not None:
            self.documents = self.documents[:, :length]
