"""MinHash signatures of documents, and the keys of their bands.

A. Broder, On the resemblance and containment of documents, 1997. Each of the bands * rows hash
functions is x -> a(x ^ c) mod 2**32 with odd a, on 32 bits of a good hash of the n-gram, so that
one multiplication of eight numbers at a time does the work.
"""

import re
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ms_data.cleaning.ngrams import window_hashes
from ms_data.cleaning.words import HAN, KANA

_SEED = 20_240_601
_BLOCK = 512
"""N-grams at a time, so that their hashes stay in the processor's cache."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_TURN = np.uint64(29)

_ALONE = re.compile(f"[{HAN}{KANA}]")
_CODES = 0x110000
_BASE = 0xD1342543DE82EF95
_GROW = 1 << 16


class MinHash:
    """Makes signatures of one shape."""

    def __init__(self, *, bands: int, rows: int, ngram_words: int) -> None:
        rng = np.random.default_rng(_SEED)
        count = bands * rows
        self._shape = (bands, rows)
        self._ngram_words = ngram_words
        self._factors = rng.integers(0, 2**31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
        self._masks = rng.integers(0, 2**32, count, dtype=np.uint32)
        self._salts = rng.integers(0, 2**63, (bands, 1), dtype=np.uint64)
        self._room = np.empty((_BLOCK, count), np.uint32)
        self._words = WordHashes()

    def signature(self, text: str) -> NDArray[np.uint32]:
        """The least value of each hash function over the n-grams of a text.

        A text of fewer words has one n-gram, all of it.
        """
        words = self._words(text)
        if not len(words):
            words = np.array([xxhash.xxh3_64_intdigest(text.encode())], np.uint64)
        found = window_hashes(words, min(self._ngram_words, len(words)))
        return self.least((found >> np.uint64(32)).astype(np.uint32))

    def least(self, ngrams: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The least value of each hash function over hashed n-grams."""
        least = np.full(len(self._factors), 2**32 - 1, np.uint32)
        for start in range(0, len(ngrams), _BLOCK):
            part = ngrams[start : start + _BLOCK, None]
            block = np.bitwise_xor(part, self._masks, out=self._room[: len(part)])
            block *= self._factors
            np.minimum(least, block.min(axis=0), out=least)
        return least

    def keys(self, signatures: NDArray[np.uint32]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Hashes of each band of some signatures, as 64 bits and 32 more; (documents, bands)."""
        bands = signatures.reshape(len(signatures), *self._shape).astype(np.uint64)
        keys = np.broadcast_to(self._salts[:, 0], bands.shape[:2]).copy()
        checks = ~keys
        for row in range(self._shape[1]):
            keys = _mixed(keys ^ bands[:, :, row])
            checks = _mixed(checks + bands[:, :, row])
        return keys, (checks >> np.uint64(32)).astype(np.uint32)


class WordHashes:
    """Hashes the words of a text, whose characters are added up as the digits of a number.

    A word is a run of letters and digits, in lower case, or a Chinese or Japanese character. Sums
    of character[j] * base**-j, times base**i, give the hash of the word that begins at i, all
    modulo 2**64: no word is ever made.
    """

    def __init__(self) -> None:
        self._powers = np.ones(0, np.uint64)
        self._backs = np.ones(0, np.uint64)

    def __call__(self, text: str) -> NDArray[np.uint64]:
        """The hash of each word, in order."""
        text = text.lower()
        if text.isascii():
            codes: NDArray[Any] = np.frombuffer(text.encode(), np.uint8)
        else:
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        kinds = np.zeros(len(codes) + 2, np.uint8)
        kinds[1:-1] = _kinds(128 if text.isascii() else _CODES)[codes]
        before, after = kinds[:-1], kinds[1:]
        # A word begins or ends where the kind changes, and around each character of kind 2.
        edge = (before != after) | (before == 2)
        starts = np.flatnonzero(edge & (after > 0))
        ends = np.flatnonzero(edge & (before > 0))
        self._grow(len(codes))
        sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(codes * self._backs[: len(codes)], out=sums[1:])
        return _mixed((sums[ends] - sums[starts]) * self._powers[starts])

    def _grow(self, count: int) -> None:
        if count > len(self._powers):
            powers = np.full(count + _GROW, _BASE, np.uint64)
            backs = np.full(count + _GROW, pow(_BASE, -1, 1 << 64), np.uint64)
            powers[0] = backs[0] = 1
            self._powers, self._backs = np.cumprod(powers), np.cumprod(backs)


@cache
def _kinds(count: int) -> NDArray[np.uint8]:
    """Of each character: 0 is no part of a word, 1 one of several, 2 a word of its own."""
    found = np.zeros(count, np.uint8)
    for code, character in enumerate(map(chr, range(count))):
        if character.isalnum():
            found[code] = 2 if _ALONE.match(character) else 1
    return found


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    keys = keys * _MIX
    return keys ^ (keys >> _TURN)
