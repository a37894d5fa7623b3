"""Hashes of word windows at every position of a text, and removal of word spans."""

import re

import numpy as np
from numpy.typing import NDArray

from ms_data.cleaning.ngrams import WordHashCache
from ms_data.cleaning.words import HAN, KANA

_WORD = re.compile(rf"[^\W{HAN}{KANA}]+|[{HAN}{KANA}]")
_BASE = 0x9E3779B97F4A7C15
_INVERSE_BASE = pow(_BASE, -1, 1 << 64)


class WindowHasher:
    """Hashes of all windows of a fixed number of words.

    Prefix sums of h[j] * base**-j, multiplied by base**i, give the hash of the window that starts
    at i, modulo 2**64.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        self._hashes = WordHashCache()
        self._powers = np.ones(1, np.uint64)
        self._inverse_powers = np.ones(1, np.uint64)

    def keys(self, text: str) -> NDArray[np.uint64]:
        """Return the hash of the window at every word; empty if there are too few words."""
        words = _WORD.findall(text.lower())
        count = len(words) - self._words + 1
        if count <= 0 or not self._words:
            return np.empty(0, np.uint64)
        self._grow(len(words))
        sums = np.zeros(len(words) + 1, np.uint64)
        np.cumsum(self._hashes(words) * self._inverse_powers[: len(words)], out=sums[1:])
        keys = (sums[self._words :] - sums[:count]) * self._powers[:count]  # (windows,)
        keys ^= keys >> np.uint64(31)
        keys *= np.uint64(_BASE)
        return keys ^ (keys >> np.uint64(29))

    def _grow(self, count: int) -> None:
        if count > len(self._powers):
            powers = np.full(2 * count, _BASE, np.uint64)
            inverse_powers = np.full(2 * count, _INVERSE_BASE, np.uint64)
            powers[0] = inverse_powers[0] = 1
            self._powers, self._inverse_powers = np.cumprod(powers), np.cumprod(inverse_powers)


def cut_words(text: str, spans: list[tuple[int, int]]) -> str:
    """Remove word spans, given as (first word, one past the last word), from a text."""
    words = [match.span() for match in _WORD.finditer(text)]
    parts, done = [], 0
    for first, end in _joined(spans):
        # A cut reaches to the start of the next word, so no double spaces remain.
        begin = words[first][0]
        parts.append(text[done:begin])
        done = words[end][0] if end < len(words) else len(text)
    return "".join((*parts, text[done:]))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort spans, and join those that touch."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif first < end:
            joined.append((first, end))
    return joined
