"""Shuffled sample order as a pure function of (seed, epoch, position), without stored state.

Neighboring samples on disk form chunks. Chunks are permuted over the epoch, then samples within a
window of several chunks. A reader thus decodes every frame about once and holds one window; any
window can be computed alone, so resuming is immediate at any position.

The permutation of n values is an 8-round Feistel network on a grid of barely more than n cells;
values that fall outside are mapped again until they fall inside (cycle walking).
"""

from hashlib import blake2b
from math import isqrt

import numpy as np
from attrs import field, frozen
from attrs.validators import ge
from numpy.typing import NDArray

ROUNDS = 8
_Keys = NDArray[np.uint64]


@frozen(kw_only=True)
class Order:
    """Order in which the samples of every epoch are delivered."""

    samples: int = field(validator=ge(1))
    """Samples per epoch."""
    seed: int = 0
    """Any integer."""
    chunk_samples: int = field(default=1, validator=ge(1))
    """Neighboring samples that stay together in a window."""
    window_chunks: int = field(default=64, validator=ge(1))
    """Chunks that are shuffled together and held in memory."""
    shuffle: bool = True
    """False delivers the samples in the order on disk."""

    @property
    def window_samples(self) -> int:
        """Samples per window; the last window of an epoch may be shorter."""
        return self.chunk_samples * self.window_chunks

    def window(self, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the samples of window `number` of an epoch in delivery order, shape (w,)."""
        start = number * self.window_samples
        size = min(self.window_samples, self.samples - start)
        slots = np.arange(size, dtype=np.uint64)
        if not self.shuffle:
            return (slots + np.uint64(start)).astype(np.int64)
        # second level: shuffle within the window
        slots = permute(slots, size, self._keys(epoch, f"window {number}"))
        return self._samples_at(epoch, slots.astype(np.int64) + start)

    def _samples_at(self, epoch: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at `slots` of the epoch, in which permuted chunks lie end to end."""
        # First level: map slots of the epoch to samples through the permutation of the chunks.
        chunk = self.chunk_samples
        full_chunks, short_size = divmod(self.samples, chunk)
        keys = self._keys(epoch, "chunks")
        # The short last chunk is inserted at a random slot among the full ones.
        short_slot = int(keys[-1] % np.uint64(full_chunks + 1)) if short_size else full_chunks
        # (w,) position among the chunks, and in the chunk
        chunk_slot, offset = np.divmod(slots, chunk)
        # the same for slots after the short chunk
        slot_after, offset_after = np.divmod(slots - short_size, chunk)
        before = slots < short_slot * chunk  # (w,) slots before the short chunk
        in_short = ~before & (slots < short_slot * chunk + short_size)
        chunk_slot = np.where(before, chunk_slot, slot_after)
        offset = np.where(before, offset, offset_after)
        # any valid value; overwritten below
        chunk_slot[in_short] = min(short_slot, full_chunks - 1)
        samples: NDArray[np.int64] = offset
        if full_chunks:
            neighbors = np.arange(
                chunk_slot.min(), min(chunk_slot.max() + 1, full_chunks), dtype=np.uint64
            )
            permuted = permute(neighbors, full_chunks, keys).astype(np.int64)
            samples = permuted[chunk_slot - chunk_slot.min()] * chunk + offset
        # The short chunk holds the last samples of the epoch.
        samples[in_short] = full_chunks * chunk + slots[in_short] - short_slot * chunk
        return samples

    def _keys(self, epoch: int, purpose: str) -> _Keys:
        text = f"ms-data order 1: {self.seed} {epoch} {purpose}"
        return np.frombuffer(blake2b(text.encode(), digest_size=8 * ROUNDS).digest(), "<u8")


def permute(values: NDArray[np.uint64], size: int, keys: _Keys) -> NDArray[np.uint64]:
    """Apply the permutation of range(size) that `keys` define to `values`.

    Args:
        values: uint64, any shape, all below `size`.
        size: number of values in the permutation, 1 ≤ size < 2**60.
        keys: uint64, shape (8,), one per round.
    """
    n_high = isqrt(size - 1) + 1  # grid of left x right ≥ size cells
    # Cells outside the range are mapped again, on average less than once.
    n_low = -(-size // n_high)
    images = _rounds(values, np.uint64(n_high), np.uint64(n_low), keys)
    outside = images >= size
    while outside.any():
        images[outside] = _rounds(images[outside], np.uint64(n_high), np.uint64(n_low), keys)
        outside = images >= size
    return images


def _rounds(
    values: NDArray[np.uint64], n_high: np.uint64, n_low: np.uint64, keys: _Keys
) -> NDArray[np.uint64]:
    # An unbalanced Feistel network: each round adds a hash of one half to the other, modulo its
    # size.
    high, low = np.divmod(values, n_low)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        high += _hash_below(n_high, low, even)
        high -= n_high * (high >= n_high)
        low += _hash_below(n_low, high, odd)
        low -= n_low * (low >= n_low)
    return high * n_low + low


def _hash_below(bound: np.uint64, values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash every value to a number below `bound`, which is below 2**32."""
    # Multiply-xorshift hash; the high 32 bits are scaled to the bound without a modulo.
    mixed = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return ((mixed >> np.uint64(32)) * bound) >> np.uint64(32)
