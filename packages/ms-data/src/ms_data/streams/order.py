"""Orders samples by a pure function of (seed, epoch, position) with no memory.

Samples that lie together on disk form chunks. Chunks are permuted over the whole epoch, then
samples within a window of a few chunks. So a reader decodes each frame about once and holds one
window; any window is computed alone, which makes resuming at any point immediate.

The permutation of n values is an 8-round Feistel network on a grid of barely more
than n cells; values that fall outside are sent round again (cycle walking).
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
    """The order in which the samples of each epoch are delivered."""

    samples: int = field(validator=ge(1))
    """Samples in an epoch."""
    seed: int = 0
    """Any integer."""
    chunk_samples: int = field(default=1, validator=ge(1))
    """Neighbouring samples that stay in one window."""
    window_chunks: int = field(default=64, validator=ge(1))
    """Chunks that are shuffled together and held in memory."""
    shuffle: bool = True
    """False delivers the samples as they lie on disk."""

    @property
    def window_samples(self) -> int:
        """Samples in a window; the last window of an epoch may be shorter."""
        return self.chunk_samples * self.window_chunks

    def window(self, epoch: int, number: int) -> NDArray[np.int64]:
        """Return the samples of window `number` of an epoch, shape (w,), in their order."""
        start = number * self.window_samples
        size = min(self.window_samples, self.samples - start)
        slots = np.arange(size, dtype=np.uint64)
        if not self.shuffle:
            return (slots + np.uint64(start)).astype(np.int64)
        slots = permute(slots, size, self._keys(epoch, f"window {number}"))
        return self._samples_at(epoch, slots.astype(np.int64) + start)

    def _samples_at(self, epoch: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at `slots` of the epoch's permuted chunks laid end to end."""
        chunk = self.chunk_samples
        whole, rest = divmod(self.samples, chunk)
        keys = self._keys(epoch, "chunks")
        # The short chunk takes a place of its own among the whole ones.
        short = int(keys[-1] % np.uint64(whole + 1)) if rest else whole
        place, offset = np.divmod(slots, chunk)
        place_after, offset_after = np.divmod(slots - rest, chunk)
        before = slots < short * chunk
        inside = ~before & (slots < short * chunk + rest)
        place = np.where(before, place, place_after)
        offset = np.where(before, offset, offset_after)
        place[inside] = min(short, whole - 1)
        samples: NDArray[np.int64] = offset
        if whole:
            near = np.arange(place.min(), min(place.max() + 1, whole), dtype=np.uint64)
            moved = permute(near, whole, keys).astype(np.int64)
            samples = moved[place - place.min()] * chunk + offset
        samples[inside] = whole * chunk + slots[inside] - short * chunk
        return samples

    def _keys(self, epoch: int, purpose: str) -> _Keys:
        text = f"ms-data order 1: {self.seed} {epoch} {purpose}"
        return np.frombuffer(blake2b(text.encode(), digest_size=8 * ROUNDS).digest(), "<u8")


def permute(values: NDArray[np.uint64], size: int, keys: _Keys) -> NDArray[np.uint64]:
    """Permute `values` as the permutation of range(size) that `keys` choose.

    Args:
        values: uint64, any shape, each below `size`.
        size: how many values are permuted, 1 ≤ size < 2**60.
        keys: uint64, shape (8,), one a round.
    """
    left = isqrt(size - 1) + 1
    right = -(-size // left)
    images = _rounds(values, np.uint64(left), np.uint64(right), keys)
    outside = images >= size
    while outside.any():
        images[outside] = _rounds(images[outside], np.uint64(left), np.uint64(right), keys)
        outside = images >= size
    return images


def _rounds(
    values: NDArray[np.uint64], left: np.uint64, right: np.uint64, keys: _Keys
) -> NDArray[np.uint64]:
    high, low = np.divmod(values, right)
    for even, odd in zip(keys[::2], keys[1::2], strict=True):
        high += _hash_below(left, low, even)
        high -= left * (high >= left)
        low += _hash_below(right, high, odd)
        low -= right * (low >= right)
    return high * right + low


def _hash_below(bound: np.uint64, values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """Hash each value to a number below `bound`, which is below 2**32."""
    mixed = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xD6E8FEB86659FD93)
    return ((mixed >> np.uint64(32)) * bound) >> np.uint64(32)
