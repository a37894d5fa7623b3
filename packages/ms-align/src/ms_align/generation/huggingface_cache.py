"""transformers' cache interface on top of ours; imported only when such a model runs."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


class CacheAdapter(Cache):
    """Adapts our cache to transformers' order of dims, (B, Hk, S, D)."""

    def __init__(self, cache: Any) -> None:
        super().__init__(layers=[])
        self._cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values; return all."""
        k, v = self._cache.put(layer_idx, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return k.transpose(1, 2), v.transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached columns before this forward pass."""
        return int(self._cache.past_length)

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return length and offset of the keys that a mask must cover."""
        count = query if isinstance(query, int) else query.shape[0]
        return int(self._cache.past_length) + count, 0
