"""Adapter that gives our key-value cache the interface of transformers' caches."""

from typing import Any

from torch import Tensor

from ms_parallel.errors import ModelError
from ms_parallel.models.cache import KeyValueCache


class UnknownCacheError(ModelError, AttributeError):
    """A model accesses a cache attribute that the adapter does not have."""


class BlockCache:
    """Cache with the interface that transformers' blocks expect.

    Args:
        cache: stores the keys and values.
    """

    def __init__(self, cache: KeyValueCache) -> None:
        self.cache = cache

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new keys and values (B, heads, S, D); return all, (B, heads, cached + S, D)."""
        key = key.to(value.dtype)  # float32 rotary tables promote keys to float32
        # Our cache is (B, S, heads, D).
        k, v = self.cache.append(layer_idx, key.transpose(1, 2), value.transpose(1, 2))
        return k.transpose(1, 2), v.transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of cached positions."""
        return self.cache.length

    def __getattr__(self, name: str) -> Any:
        """Reject any other attribute; `hasattr` and `getattr` with a default see it as missing.

        Raises:
            UnknownCacheError: always.
        """
        raise UnknownCacheError(
            f"this model uses {name!r} of its cache, which is not supported; generate with"
            " transformers"
        )
