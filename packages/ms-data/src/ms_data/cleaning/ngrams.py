"""Finds repeated n-grams of words with sorted hashes instead of a text for each."""

import numpy as np
import xxhash
from numpy.typing import NDArray

_MIX = np.uint64(0x9E3779B97F4A7C15)
_TURN = np.uint64(29)
_GROWTH = 0xD1342543DE82EF95
"""How the factor grows from word to word, so that their order counts."""


class Ngrams:
    """The n-grams of a text, for n that grows by one."""

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
        """Where n-grams begin of which all parts are repeated: only these can be repeated too."""
        self._n = 1

    def grow(self) -> None:
        """Go on to n-grams of one word more."""
        self._n += 1
        inside = self._starts + self._n <= len(self._words)
        starts, keys = self._starts[inside], self._keys[inside]
        if self._n > 2:
            repeated = _repeated(keys)
            starts, keys = starts[repeated], keys[repeated]
        last = self._words[starts + self._n - 1]
        self._starts = starts
        self._keys = ((keys << _TURN) ^ (keys >> _TURN) ^ last) * _MIX + _MIX

    def top_characters(self) -> int:
        """Count the characters and spaces that the commonest n-gram fills; of equals the first."""
        if len(self._words) < self._n:
            return 0
        if not len(self._starts):
            return int(self._joined(np.zeros(1, np.int64))[0])
        _, first, counts = np.unique(self._keys, return_index=True, return_counts=True)
        top = counts.max()
        start = 0 if top == 1 else first[counts == top].min()
        begin = 0 if top == 1 else self._starts[start]
        return int(top * self._joined(np.array([begin]))[0])

    def repeated_characters(self) -> int:
        """Count the characters, without spaces, of n-grams that stood before, none of them twice.

        The text is read from left to right. Where an n-gram stood before, reading goes on behind
        it, and n-grams that begin within it are not counted.
        """
        if not len(self._starts):
            return 0
        repeated = _repeated(self._keys)
        starts, keys = self._starts[repeated], self._keys[repeated]
        sizes = self._ends[starts + self._n] - self._ends[starts]
        seen: set[int] = set()
        found, free = 0, 0
        for start, key, size in zip(starts.tolist(), keys.tolist(), sizes.tolist(), strict=True):
            if start < free:
                continue
            if key in seen:
                found += size
                free = start + self._n
            else:
                seen.add(key)
        return found

    def _joined(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Compute the length of the n-grams at some places, with a space between words."""
        return self._ends[starts + self._n] - self._ends[starts] + self._n - 1


def _repeated(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Find which keys occur more than once."""
    order = np.argsort(keys)
    ordered = keys[order]
    same = ordered[1:] == ordered[:-1]
    found = np.zeros(len(keys), bool)
    found[order[1:][same]] = True
    found[order[:-1][same]] = True
    return found


def window_hashes(hashes: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """Hash every n neighbouring words, from the words' hashes; empty where there are fewer."""
    count = len(hashes) - n + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    factor = 1
    found = hashes[:count].copy()
    for at in range(1, n):
        factor = factor * _GROWTH % (1 << 64)
        found += hashes[at : at + count] * np.uint64(factor)
    found *= _MIX
    found ^= found >> _TURN
    return found


class WordHashCache:
    """64-bit hashes of words, each computed once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, words: list[str]) -> NDArray[np.uint64]:
        """Hash each word."""
        known = self._known
        if len(known) > 1 << 20:
            known.clear()
        for word in set(words).difference(known):
            known[word] = xxhash.xxh3_64_intdigest(word.encode(errors="replace"))
        return np.fromiter(map(known.__getitem__, words), np.uint64, len(words))
