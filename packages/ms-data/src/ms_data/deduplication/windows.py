"""Rows of words, hashed at every place of a text, and the characters that they fill."""

import re

import numpy as np
from numpy.typing import NDArray

from ms_data.cleaning.ngrams import WordHashCache
from ms_data.cleaning.words import HAN, KANA

_WORD = re.compile(rf"[^\W{HAN}{KANA}]+|[{HAN}{KANA}]")
_BASE = 0x9E3779B97F4A7C15
_BACK = pow(_BASE, -1, 1 << 64)


class Windows:
    """Hashes all rows of so many neighbouring words.

    Sums of h[j] * base**-j, times base**i, give the hash of the row that begins at i, all
    modulo 2**64.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._hashes = WordHashCache()
        self._powers = np.ones(1, np.uint64)
        self._backs = np.ones(1, np.uint64)

    def keys(self, text: str) -> NDArray[np.uint64]:
        """The hash of the row that begins at each word; empty where there are fewer words."""
        words = _WORD.findall(text.lower())
        count = len(words) - self._words + 1
        if count <= 0 or not self._words:
            return np.empty(0, np.uint64)
        self._grow(len(words))
        sums = np.zeros(len(words) + 1, np.uint64)
        np.cumsum(self._hashes(words) * self._backs[: len(words)], out=sums[1:])
        keys = (sums[self._words :] - sums[:count]) * self._powers[:count]
        keys ^= keys >> np.uint64(31)
        keys *= np.uint64(_BASE)
        return keys ^ (keys >> np.uint64(29))

    def _grow(self, count: int) -> None:
        if count > len(self._powers):
            more = np.full(2 * count, _BASE, np.uint64)
            back = np.full(2 * count, _BACK, np.uint64)
            more[0] = back[0] = 1
            self._powers, self._backs = np.cumprod(more), np.cumprod(back)


def cut_words(text: str, spans: list[tuple[int, int]]) -> str:
    """A text without some rows of words, given as (first word, word behind the last)."""
    places = [found.span() for found in _WORD.finditer(text)]
    parts, done = [], 0
    for first, end in _joined(spans):
        begin = places[first][0]
        parts.append(text[done:begin])
        done = places[end][0] if end < len(places) else len(text)
    return "".join((*parts, text[done:]))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort spans and join those that meet."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif first < end:
            found.append((first, end))
    return found
