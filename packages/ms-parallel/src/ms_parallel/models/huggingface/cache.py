"""Our key-value cache with the interface that transformers' blocks expect."""

from typing import Any

from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.models.cache import KeyValueCache


class UnknownCacheError(ModelError, AttributeError):
    """A model uses its cache in a way that ours does not support."""


class BlockCache:
    """Cache interface that transformers' blocks use.

    Args:
        held: stores the keys and values.
    """

    def __init__(self, held: KeyValueCache) -> None:
        self.held = held

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values (B, heads, S, D) and return all of them."""
        key = key.to(value.dtype)  # rotary tables in float32 promote it
        k, v = self.held.append(layer_idx, key.transpose(1, 2), value.transpose(1, 2))
        return k.transpose(1, 2), v.transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached positions."""
        return self.held.length

    def __getattr__(self, name: str) -> Any:
        """Reject all else; for `hasattr` and `getattr` with a default the attribute is missing.

        Raises:
            UnknownCacheError: always.
        """
        raise UnknownCacheError(
            f"this model asks its cache for {name!r}, which is not supported here; generate with"
            " transformers"
        )
