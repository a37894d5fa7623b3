"""MinHash signatures of documents, and band keys for LSH.

A. Broder, On the resemblance and containment of documents, 1997. A hash function is x -> a x mod
2**32 with odd a, applied to 32 bits of a good hash of the n-gram, so that one SIMD multiplication
handles eight numbers. The minimum over the n-grams is one entry of the signature, and the maximum
another: by symmetry, it is the minimum of a second function. Both entries of two texts agree with
probability J (|A and B| - 1) / (|A or B| - 1) instead of J**2. The two entries are in different
bands, so all rows of a band come from different functions.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ms_data.cleaning.ngrams import window_hashes
from ms_data.cleaning.words import HAN, KANA

SIGNATURES = 2
"""Version of the signatures; increase it on any change, so that interrupted passes of another
version do not resume."""
_SEED = 20_240_601
_BLOCK = 512
"""N-grams per block, so that their hashes stay in the CPU cache."""
_GROUP_CHARACTERS = 1 << 16
"""Characters per group of texts, which shares the overhead of numpy calls."""
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)

_SINGLE = re.compile(f"[{HAN}{KANA}]")
_CODES = 0x110000
_BASE = 0xD1342543DE82EF95
_GROW = 1 << 16


class MinHash:
    """Computes signatures of one shape."""

    def __init__(self, *, bands: int, rows: int, ngram_words: int) -> None:
        rng = np.random.default_rng(_SEED)
        self._count = bands * rows
        self._shape = (bands, rows)
        self._ngram_words = ngram_words
        functions = max(rows, -(-self._count // 2))  # minimum and maximum are in different bands
        # Odd factors are bijections modulo 2**32, so they permute the n-gram hashes.
        factors = rng.integers(0, 2**31, (functions, 1), dtype=np.uint32)
        self._factors = factors * np.uint32(2) + np.uint32(1)
        # a different hash function per band
        self._salts = rng.integers(0, 2**63, (bands, 1), dtype=np.uint64)
        self._buffer = np.empty((functions, _BLOCK), np.uint32)
        self._words = WordHashes()

    def signatures(self, texts: Sequence[str]) -> NDArray[np.uint32]:
        """Compute signatures of texts, shape (documents, bands * rows); short texts are grouped."""
        result = np.empty((len(texts), self._count), np.uint32)
        done = 0
        for group in _groups(texts):
            self._signatures_of_group(group, result[done : done + len(group)])
            done += len(group)
        return result

    def signature(self, text: str) -> NDArray[np.uint32]:
        """Return the minima and maxima of the hash functions over the n-grams of a text.

        A text with fewer words than an n-gram counts as one n-gram.
        """
        words = self._words(text)
        if not len(words):
            words = np.array([xxhash.xxh3_64_intdigest(text.encode())], np.uint64)
        return self.signature_of_ngrams(_ngrams(words, min(self._ngram_words, len(words))))

    def signature_of_ngrams(self, ngrams: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the signature of hashed n-grams; at least one is needed."""
        signature = np.empty(self._count, np.uint32)
        self._min_max(ngrams, signature)
        return signature

    def _signatures_of_group(self, texts: Sequence[str], out: NDArray[np.uint32]) -> None:
        words, counts = self._words.hash_texts(texts)  # (total words,), words per text
        # N-grams across two texts are computed too, but never used.
        ngrams = _ngrams(words, self._ngram_words)
        start = 0
        for index, (text, count) in enumerate(zip(texts, counts, strict=True)):
            ngram_count = count - self._ngram_words + 1  # number of n-grams entirely in this text
            if ngram_count > 0:
                self._min_max(ngrams[start : start + ngram_count], out[index])
            else:
                out[index] = self.signature(text)
            start += count

    def _min_max(self, ngrams: NDArray[np.uint32], out: NDArray[np.uint32]) -> None:
        """Write the minima of the functions to `out`, then the maxima."""
        functions = len(self._factors)
        minima, maxima = out[:functions], out[functions:]  # views into the signature
        for start in range(0, len(ngrams), _BLOCK):
            part = ngrams[start : start + _BLOCK]
            block = np.multiply(self._factors, part, out=self._buffer[:, : len(part)])
            block_for_max = block[: len(maxima)]  # one function fewer if the signature size is odd
            if start == 0:
                np.minimum.reduce(block, axis=1, out=minima)
                np.maximum.reduce(block_for_max, axis=1, out=maxima)
            else:
                np.minimum(minima, np.minimum.reduce(block, axis=1), out=minima)
                np.maximum(maxima, np.maximum.reduce(block_for_max, axis=1), out=maxima)

    def keys(self, signatures: NDArray[np.uint32]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Hash every band to a 64-bit key and a 32-bit check, both of shape (documents, bands)."""
        # (documents, bands, rows)
        bands = signatures.reshape(len(signatures), *self._shape).astype(np.uint64)
        keys = np.broadcast_to(self._salts[:, 0], bands.shape[:2]).copy()
        # A second hash makes false matches of the 64-bit keys negligible.
        checks = ~keys
        for row in range(self._shape[1]):
            keys = _mix(keys ^ bands[:, :, row])
            checks = _mix(checks + bands[:, :, row])
        return keys, (checks >> np.uint64(32)).astype(np.uint32)


def _groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Group consecutive texts up to `_GROUP_CHARACTERS`; a longer text is a separate group."""
    first = size = 0
    for number, text in enumerate(texts):
        if size + len(text) > _GROUP_CHARACTERS and number > first:
            yield texts[first:number]
            first, size = number, 0
        size += len(text)
    if first < len(texts):
        yield texts[first:]


def _ngrams(words: NDArray[np.uint64], n: int) -> NDArray[np.uint32]:
    """Hash every n consecutive words to 32 bits."""
    return (window_hashes(words, n) >> np.uint64(32)).astype(np.uint32)


class WordHashes:
    """Polynomial hashes of the words of a text, computed for all words at once.

    A word is a run of letters and digits in lower case, or a Chinese or Japanese character. Prefix
    sums of character[j] * base**-j, multiplied by base**i, give the hash of the word that starts at
    i, modulo 2**64; no word strings are created.
    """

    def __init__(self) -> None:
        self._powers = np.ones(0, np.uint64)
        self._inverse_powers = np.ones(0, np.uint64)

    def __call__(self, text: str) -> NDArray[np.uint64]:
        """Return the hash of every word, in order."""
        return self._hash_words(text)[0]

    def hash_texts(self, texts: Sequence[str]) -> tuple[NDArray[np.uint64], list[int]]:
        """Return the concatenated word hashes of all texts, and the number of words per text."""
        lower = [text.lower() for text in texts]
        hashes, starts = self._hash_words("\n".join(lower))
        bounds = np.cumsum([len(text) + 1 for text in lower])
        counts = np.diff(np.searchsorted(starts, bounds), prepend=0)
        return hashes, counts.tolist()

    def _hash_words(self, text: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the hash of every word, and its offset in the lower-case text."""
        text = text.lower()
        if text.isascii():
            codes: NDArray[Any] = np.frombuffer(text.encode(), np.uint8)
        else:
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        classes = np.zeros(len(codes) + 2, np.uint8)
        _character_classes(128 if text.isascii() else _CODES).take(codes, out=classes[1:-1])
        edges = _edges(classes, text.isascii() or classes.max() < 2)
        self._grow(len(codes))
        sums = np.empty(len(codes) + 1, np.uint64)
        sums[0] = 0
        # (characters + 1,) prefix sums
        np.cumsum(codes * self._inverse_powers[: len(codes)], out=sums[1:])
        sums = sums.take(edges)  # at the starts and ends of words
        starts = edges[::2]
        return _mix((sums[1::2] - sums[::2]) * self._powers.take(starts)), starts

    def _grow(self, count: int) -> None:
        if count > len(self._powers):
            powers = np.full(count + _GROW, _BASE, np.uint64)
            backs = np.full(count + _GROW, pow(_BASE, -1, 1 << 64), np.uint64)
            powers[0] = backs[0] = 1
            self._powers, self._inverse_powers = np.cumprod(powers), np.cumprod(backs)


def _edges(classes: NDArray[np.uint8], longer: bool) -> NDArray[np.int64]:
    """Return the starts and ends of words, alternating.

    Args:
        classes: character classes, between two zeros.
        longer: no character is a single-character word.
    """
    previous, current = classes[:-1], classes[1:]
    if longer:  # then the class changes exactly at the edges
        return np.flatnonzero(previous != current)
    edge = (previous != current) | (previous == 2)
    edges = np.empty(2 * np.count_nonzero(edge & (current > 0)), np.int64)
    edges[::2] = np.flatnonzero(edge & (current > 0))
    edges[1::2] = np.flatnonzero(edge & (previous > 0))
    return edges


@cache
def _character_classes(count: int) -> NDArray[np.uint8]:
    """Return the character classes: 0 not in words, 1 part of a word, 2 a single-character word."""
    classes = np.zeros(count, np.uint8)
    for code, character in enumerate(map(chr, range(count))):
        if character.isalnum():
            classes[code] = 2 if _SINGLE.match(character) else 1
    return classes


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    keys = keys * _MIX
    return keys ^ (keys >> _SHIFT)
