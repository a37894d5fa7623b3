"""Keys and values of positions that were computed already, for generation."""

import torch
from torch import Tensor

from ms_parallel.errors import ModelError


class KeyValueCache:
    """Grows by the tokens of each forward; one for all layers of a stage.

    Layers `append` during a forward, all at the same place; the model `advance`s at its end.
    """

    def __init__(self) -> None:
        self.length = 0
        """Positions held after the last whole forward."""
        self.documents: Tensor | None = None
        """(B, length) int32, if any forward gave documents."""
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values behind the present ones.

        Args:
            layer: Global number of the layer.
            k: (B, S, heads, D).
            v: (B, S, heads, D).

        Returns:
            All keys and values, (B, length + S, heads, D) each, as views.
        """
        end = self.length + k.shape[1]
        held = self._layers.get(layer)
        if held is None or held[0].shape[1] < end:
            held = self._grow(held, k, v, max(64, 2 * end))
            self._layers[layer] = held
        keys, values = held
        keys[:, self.length : end] = k.detach()
        values[:, self.length : end] = v.detach()
        return keys[:, :end], values[:, :end]

    def _grow(
        self, held: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor]:
        grown = tuple(x.new_empty(x.shape[0], capacity, *x.shape[2:]) for x in (k, v))
        if held is not None:
            for new, old in zip(grown, held, strict=True):
                new[:, : self.length] = old[:, : self.length]
        return grown[0], grown[1]

    def all_documents(self, new: Tensor | None, rows: int, count: int) -> Tensor | None:
        """Join the documents of held and new positions.

        Args:
            new: (B, count) int32 of the new positions; None goes on with each row's last document.
            rows: B.
            count: New positions.

        Returns:
            (B, length + count), or None if documents were never given.
        """
        if new is None:
            if self.documents is None:
                return None
            new = self.documents[:, -1:].expand(rows, count)
        held = self.documents
        if held is None:
            held = new.new_zeros(rows, self.length)
        return torch.cat((held, new), 1)

    def advance(self, count: int, documents: Tensor | None) -> None:
        """Count `count` positions as held; `documents` is what `all_documents` gave."""
        self.length += count
        self.documents = documents

    def rewind(self, length: int) -> None:
        """Forget all positions from `length` on.

        Raises:
            ModelError: fewer are held.
        """
        if not 0 <= length <= self.length:
            raise ModelError(f"cannot rewind a cache of {self.length} positions to {length}")
        self.length = length
        if self.documents is not None:
            self.documents = self.documents[:, :length]
