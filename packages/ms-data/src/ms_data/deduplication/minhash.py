"""MinHash signatures of documents, and the keys of their bands.

A. Broder, On the resemblance and containment of documents, 1997. Each of the bands * rows hash
functions is x -> a(x ^ c) mod 2**32 with odd a, on 32 bits of a good hash of the n-gram, so that
one multiplication of eight numbers at a time does the work.
"""

import re

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

_SIGNS = str.maketrans({one: " " for one in map(chr, range(128)) if not one.isalnum()})
_OTHERS = re.compile(r"[\W_]+")
_CHARACTERS = re.compile(f"([{HAN}{KANA}])")
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
    """Hashes the words of a text, whose bytes are added up as the digits of a number.

    Sums of byte[j] * base**-j, times base**i, give the hash of the word that begins at i, all
    modulo 2**64: no word is ever made.
    """

    def __init__(self) -> None:
        self._powers = np.ones(0, np.uint64)
        self._backs = np.ones(0, np.uint64)

    def __call__(self, text: str) -> NDArray[np.uint64]:
        """The hash of each word, in order."""
        content = np.frombuffer(comparable(text).encode(), np.uint8)
        self._grow(len(content))
        inside = np.zeros(len(content) + 2, bool)
        np.not_equal(content, 32, out=inside[1:-1])
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        starts, ends = edges[::2], edges[1::2]
        sums = np.zeros(len(content) + 1, np.uint64)
        np.cumsum(content * self._backs[: len(content)], out=sums[1:])
        return _mixed((sums[ends] - sums[starts]) * self._powers[starts])

    def _grow(self, count: int) -> None:
        if count > len(self._powers):
            powers = np.full(count + _GROW, _BASE, np.uint64)
            backs = np.full(count + _GROW, pow(_BASE, -1, 1 << 64), np.uint64)
            powers[0] = backs[0] = 1
            self._powers, self._backs = np.cumprod(powers), np.cumprod(backs)


def comparable(text: str) -> str:
    """A text as words with spaces between: no case, no signs, each Chinese character a word."""
    text = text.lower()
    if text.isascii():
        return text.translate(_SIGNS)
    return _CHARACTERS.sub(r" \1 ", _OTHERS.sub(" ", text))


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    keys = keys * _MIX
    return keys ^ (keys >> _TURN)
