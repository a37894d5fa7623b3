"""MinHash signatures of documents, and the keys of their bands.

A. Broder, On the resemblance and containment of documents, 1997. A hash function is x -> a x
mod 2**32 with odd a, on 32 bits of a good hash of the n-gram, so that one multiplication of eight
numbers at a time does the work. Its least value over the n-grams is one entry of the signature, and
its greatest another: by symmetry that is the least of a second function, and of two texts both are
the same with probability J (|A and B| - 1) / (|A or B| - 1) instead of J**2. The two stand in
different bands, so that within a band all rows are of different functions.
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
"""Rises when a text gets another signature: an interrupted pass of another number cannot go on."""
_SEED = 20_240_601
_BLOCK = 512
"""N-grams at a time, so that their hashes stay in the processor's cache."""
_TOGETHER = 1 << 16
"""Characters that pass at once: what a call of numpy costs is then shared by several texts."""
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
        self._count = bands * rows
        self._shape = (bands, rows)
        self._ngram_words = ngram_words
        functions = max(rows, -(-self._count // 2))  # so that both values are in different bands
        factors = rng.integers(0, 2**31, (functions, 1), dtype=np.uint32)
        self._factors = factors * np.uint32(2) + np.uint32(1)
        self._salts = rng.integers(0, 2**63, (bands, 1), dtype=np.uint64)
        self._room = np.empty((functions, _BLOCK), np.uint32)
        self._words = WordHashes()

    def signatures(self, texts: Sequence[str]) -> NDArray[np.uint32]:
        """Compute signatures of texts, (documents, bands * rows); short texts pass together."""
        found = np.empty((len(texts), self._count), np.uint32)
        done = 0
        for group in _groups(texts):
            self._together(group, found[done : done + len(group)])
            done += len(group)
        return found

    def signature(self, text: str) -> NDArray[np.uint32]:
        """Return the least and greatest values of each hash function over a text's n-grams.

        A text of fewer words has one n-gram, all of it.
        """
        words = self._words(text)
        if not len(words):
            words = np.array([xxhash.xxh3_64_intdigest(text.encode())], np.uint64)
        return self.of(_ngrams(words, min(self._ngram_words, len(words))))

    def of(self, ngrams: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return the signature of hashed n-grams, of which there is one at least."""
        found = np.empty(self._count, np.uint32)
        self._extremes(ngrams, found)
        return found

    def _together(self, texts: Sequence[str], found: NDArray[np.uint32]) -> None:
        words, counts = self._words.of_each(texts)
        ngrams = _ngrams(words, self._ngram_words)
        start = 0
        for number, (text, count) in enumerate(zip(texts, counts, strict=True)):
            within = count - self._ngram_words + 1  # n-grams that begin and end in this text
            if within > 0:
                self._extremes(ngrams[start : start + within], found[number])
            else:
                found[number] = self.signature(text)
            start += count

    def _extremes(self, ngrams: NDArray[np.uint32], found: NDArray[np.uint32]) -> None:
        """Write the least values of the functions, and then the greatest."""
        functions = len(self._factors)
        least, greatest = found[:functions], found[functions:]
        for start in range(0, len(ngrams), _BLOCK):
            part = ngrams[start : start + _BLOCK]
            block = np.multiply(self._factors, part, out=self._room[:, : len(part)])
            others = block[: len(greatest)]  # one function fewer where their number is odd
            if start == 0:
                np.minimum.reduce(block, axis=1, out=least)
                np.maximum.reduce(others, axis=1, out=greatest)
            else:
                np.minimum(least, np.minimum.reduce(block, axis=1), out=least)
                np.maximum(greatest, np.maximum.reduce(others, axis=1), out=greatest)

    def keys(self, signatures: NDArray[np.uint32]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Hash each band of some signatures, to 64 bits and 32 more; (documents, bands)."""
        bands = signatures.reshape(len(signatures), *self._shape).astype(np.uint64)
        keys = np.broadcast_to(self._salts[:, 0], bands.shape[:2]).copy()
        checks = ~keys
        for row in range(self._shape[1]):
            keys = _mixed(keys ^ bands[:, :, row])
            checks = _mixed(checks + bands[:, :, row])
        return keys, (checks >> np.uint64(32)).astype(np.uint32)


def _groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Group neighbouring texts up to `_TOGETHER` characters; a longer text is a group alone."""
    first = size = 0
    for number, text in enumerate(texts):
        if size + len(text) > _TOGETHER and number > first:
            yield texts[first:number]
            first, size = number, 0
        size += len(text)
    if first < len(texts):
        yield texts[first:]


def _ngrams(words: NDArray[np.uint64], n: int) -> NDArray[np.uint32]:
    """Hash every n neighbouring words, to 32 bits."""
    return (window_hashes(words, n) >> np.uint64(32)).astype(np.uint32)


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
        """Hash each word, in order."""
        return self._found(text)[0]

    def of_each(self, texts: Sequence[str]) -> tuple[NDArray[np.uint64], list[int]]:
        """Return the hashes of the words of all texts, end to end, and how many each text has."""
        lower = [text.lower() for text in texts]
        found, starts = self._found("\n".join(lower))
        bounds = np.cumsum([len(text) + 1 for text in lower])
        counts = np.diff(np.searchsorted(starts, bounds), prepend=0)
        return found, counts.tolist()

    def _found(self, text: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the hash of each word, and where it begins in the text in lower case."""
        text = text.lower()
        if text.isascii():
            codes: NDArray[Any] = np.frombuffer(text.encode(), np.uint8)
        else:
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        kinds = np.zeros(len(codes) + 2, np.uint8)
        _kinds(128 if text.isascii() else _CODES).take(codes, out=kinds[1:-1])
        edges = _edges(kinds, text.isascii() or kinds.max() < 2)
        self._grow(len(codes))
        sums = np.empty(len(codes) + 1, np.uint64)
        sums[0] = 0
        np.cumsum(codes * self._backs[: len(codes)], out=sums[1:])
        sums = sums.take(edges)
        starts = edges[::2]
        return _mixed((sums[1::2] - sums[::2]) * self._powers.take(starts)), starts

    def _grow(self, count: int) -> None:
        if count > len(self._powers):
            powers = np.full(count + _GROW, _BASE, np.uint64)
            backs = np.full(count + _GROW, pow(_BASE, -1, 1 << 64), np.uint64)
            powers[0] = backs[0] = 1
            self._powers, self._backs = np.cumprod(powers), np.cumprod(backs)


def _edges(kinds: NDArray[np.uint8], longer: bool) -> NDArray[np.int64]:
    """Find where each word begins and ends, in turns.

    Args:
        kinds: of the characters, between two zeros.
        longer: no character is a word of its own.
    """
    before, after = kinds[:-1], kinds[1:]
    if longer:  # the kind changes at each edge, and at nothing else
        return np.flatnonzero(before != after)
    edge = (before != after) | (before == 2)
    edges = np.empty(2 * np.count_nonzero(edge & (after > 0)), np.int64)
    edges[::2] = np.flatnonzero(edge & (after > 0))
    edges[1::2] = np.flatnonzero(edge & (before > 0))
    return edges


@cache
def _kinds(count: int) -> NDArray[np.uint8]:
    """Tell each character's kind: 0 is no part of a word, 1 one of several, 2 a word of its own."""
    found = np.zeros(count, np.uint8)
    for code, character in enumerate(map(chr, range(count))):
        if character.isalnum():
            found[code] = 2 if _ALONE.match(character) else 1
    return found


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    keys = keys * _MIX
    return keys ^ (keys >> _TURN)
