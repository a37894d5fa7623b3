"""Repeated word n-grams, found by sorting hashes instead of storing the n-grams."""

import numpy as np
import xxhash
from numpy.typing import NDArray

_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)
_GROWTH = 0xD1342543DE82EF95
"""Multiplier per word position, which makes hashes depend on the word order."""


class Ngrams:
    """The word n-grams of a text, for increasing n."""

    def __init__(self, words: list[str]) -> None:
        ids: dict[str, int] = {}
        for word in words:
            if word not in ids:
                ids[word] = len(ids)
        self._lengths = np.fromiter(map(len, words), np.int64, len(words))
        self._ends = np.concatenate(([0], np.cumsum(self._lengths)))
        self._words = np.fromiter(map(ids.__getitem__, words), np.uint64, len(words))
        self._keys = self._words * _MIX + _MIX
        self._starts = np.arange(len(words))
        """Starts of n-grams whose (n-1)-grams are repeated; only these can be repeated."""
        self._n = 1

    def grow(self) -> None:
        """Increase n by one."""
        self._n += 1
        inside = self._starts + self._n <= len(self._words)
        starts, keys = self._starts[inside], self._keys[inside]
        # Only positions with a repeated (n-1)-gram remain, so each step gets cheaper.
        if self._n > 2:
            repeated = _repeated(keys)
            starts, keys = starts[repeated], keys[repeated]
        last = self._words[starts + self._n - 1]
        self._starts = starts
        # combine with the next word
        self._keys = ((keys << _SHIFT) ^ (keys >> _SHIFT) ^ last) * _MIX + _MIX

    def top_characters(self) -> int:
        """Return the characters, with spaces, that the most frequent n-gram covers.

        Of several equally frequent n-grams, the first counts.
        """
        if len(self._words) < self._n:
            return 0
        if not len(self._starts):
            return int(self._joined_lengths(np.zeros(1, np.int64))[0])
        _, first, counts = np.unique(self._keys, return_index=True, return_counts=True)
        top = counts.max()
        start = 0 if top == 1 else first[counts == top].min()
        begin = 0 if top == 1 else self._starts[start]
        return int(top * self._joined_lengths(np.array([begin]))[0])

    def repeated_characters(self) -> int:
        """Return the characters of repeated n-grams, without spaces, counting none twice.

        The text is scanned from left to right. The scan continues after a repeated n-gram, so
        n-grams that overlap it are not counted.
        """
        if not len(self._starts):
            return 0
        repeated = _repeated(self._keys)
        starts, keys = self._starts[repeated], self._keys[repeated]
        sizes = self._ends[starts + self._n] - self._ends[starts]  # characters without spaces
        seen: set[int] = set()
        total, next_free = 0, 0
        for start, key, size in zip(starts.tolist(), keys.tolist(), sizes.tolist(), strict=True):
            if start < next_free:
                continue
            if key in seen:
                total += size
                next_free = start + self._n
            else:
                seen.add(key)
        return total

    def _joined_lengths(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of the n-grams at `starts`, with spaces between words."""
        return self._ends[starts + self._n] - self._ends[starts] + self._n - 1


def _repeated(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which keys occur more than once."""
    order = np.argsort(keys)
    ordered = keys[order]
    equal_to_previous = ordered[1:] == ordered[:-1]
    repeated = np.zeros(len(keys), bool)
    repeated[order[1:][equal_to_previous]] = True
    repeated[order[:-1][equal_to_previous]] = True
    return repeated


def window_hashes(hashes: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Hash every n consecutive words, given the hashes of the words; empty if there are fewer."""
    count = len(hashes) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    factor = 1
    result = hashes[:count].copy()
    for offset in range(1, n):
        factor = factor * _GROWTH % (1 << 64)
        result += hashes[offset : offset + count] * np.uint64(factor)
    result *= _MIX
    result ^= result >> _SHIFT
    return result


class WordHashCache:
    """64-bit hashes of words, computed once per word."""

    def __init__(self) -> None:
        self._cache: dict[str, int] = {}

    def __call__(self, words: list[str]) -> NDArray[np.uint64]:
        """Return the hash of every word, shape (n,)."""
        hashes = self._cache
        if len(hashes) > 1 << 20:
            hashes.clear()
        for word in set(words).difference(hashes):
            hashes[word] = xxhash.xxh3_64_intdigest(word.encode(errors="replace"))
        return np.fromiter(map(hashes.__getitem__, words), np.uint64, len(words))
