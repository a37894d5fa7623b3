"""Remembers the tokens of words, and looks up those of many words at once.

An open hash table in arrays: the bytes of a word are compared as a few integers of eight bytes, so
that no word is taken for another. It has a fixed size; words that find no room in it, or are too
long, are encoded again each time.
"""

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

LONGEST_WORD = 64
"""Bytes of the longest word that is remembered."""
PADDING = b"\0" * LONGEST_WORD
"""What must follow the words of a buffer."""

_SLOT_BITS, _MOST_WORDS, _MOST_TOKENS = 20, 1 << 18, 1 << 21
_WIDTHS = (1, 2, LONGEST_WORD // 8)
"""Integers by which words are compared: those of up to 8, 16 and 64 bytes."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)

Integers: TypeAlias = NDArray[np.int64]
Tokens: TypeAlias = NDArray[np.uint32]
Keys: TypeAlias = NDArray[np.uint64]
"""The bytes of words as integers, zeros behind them, shape (width, n)."""


class WordTable:
    """The tokens of words that were seen before; several threads may use it.

    Args:
        encode: gives the tokens of each of some words, and is asked once for a word that has room.
    """

    def __init__(self, encode: Callable[[Sequence[bytes]], Sequence[Sequence[int]]]) -> None:
        self._encode = encode
        self._lock = Lock()
        # Entry 0 stands for no word. np.zeros takes memory only where it is written to.
        self._slots = np.zeros(1 << _SLOT_BITS, np.int32)
        self._keys = np.zeros((_WIDTHS[-1], _MOST_WORDS), np.uint64)
        self._sizes = np.zeros(_MOST_WORDS, np.uint8)
        self._begins = np.zeros(_MOST_WORDS, np.int64)
        self._counts = np.zeros(_MOST_WORDS, np.int64)
        self._tokens = np.zeros(_MOST_TOKENS, np.uint32)
        self._words, self._used = 1, 0

    def encode(self, buffer: bytes, begins: Integers, sizes: Integers) -> tuple[Tokens, Integers]:
        """Encode words of a buffer.

        Args:
            buffer: holds the words, and `PADDING` behind them.
            begins: where each begins, shape (n,).
            sizes: bytes of each, shape (n,), 1 or more.

        Returns:
            The tokens of all words laid end to end, and how many each has, shape (n,).
        """
        entries = self._find(buffer, begins, sizes)
        counts = self._counts.take(entries)
        missing = np.flatnonzero(entries == 0)
        found: list[Sequence[int]] = []
        if len(missing):
            words = _cut(buffer, begins[missing], sizes[missing])
            tokens_of = self._learn(list(dict.fromkeys(words)))
            found = [tokens_of[word] for word in words]
            counts[missing] = [len(one) for one in found]
        before = counts.cumsum() - counts
        # What is not known is taken from anywhere, and overwritten.
        places = _ranges(self._begins.take(entries), counts)
        tokens = self._tokens.take(places, mode="clip")
        if found:
            places = _ranges(before[missing], counts[missing])
            tokens[places] = np.fromiter((one for word in found for one in word), np.uint32)
        return tokens, counts

    def _find(self, buffer: bytes, begins: Integers, sizes: Integers) -> Integers:
        """Return the entry of each word, shape (n,); 0 where it is not known."""
        entries = np.zeros(len(begins), np.int64)
        for width, some in _by_width(sizes):
            of_these = sizes.take(some)
            keys = _keys(buffer, begins.take(some), of_these, width)
            entries[some] = self._look_up(keys, of_these)
        return entries

    def _look_up(self, keys: Keys, sizes: Integers) -> Integers:
        slots = _first_slots(keys, sizes)
        entries: Integers = self._slots.take(slots).astype(np.int64)
        asked = np.flatnonzero((entries != 0) & ~self._are(entries, keys, sizes))
        while len(asked):  # another word was there, so the next slot is looked at
            slots[asked] = (slots[asked] + 1) & (len(self._slots) - 1)
            found = self._slots[slots[asked]].astype(np.int64)
            entries[asked] = found
            asked = asked[(found != 0) & ~self._are(found, keys[:, asked], sizes[asked])]
        return entries

    def _are(self, entries: Integers, keys: Keys, sizes: Integers) -> NDArray[np.bool_]:
        """Return whether each entry of the table is the word beside it."""
        same: NDArray[np.bool_] = self._sizes.take(entries) == sizes
        for at, part in enumerate(keys):
            same &= self._keys[at].take(entries) == part
        return same

    def _learn(self, words: Sequence[bytes]) -> dict[bytes, Sequence[int]]:
        """Encode different words and remember those that have room."""
        tokens_of = dict(zip(words, self._encode(words), strict=True))
        with self._lock:
            room = _MOST_WORDS - self._words
            short = [word for word in words if len(word) <= LONGEST_WORD][:room]
            buffer, sizes = b"".join(short), np.fromiter(map(len, short), np.int64)
            begins = sizes.cumsum() - sizes
            # Another thread may have been faster.
            new = np.flatnonzero(self._find(buffer + PADDING, begins, sizes) == 0)
            tokens = [tokens_of[short[at]] for at in new.tolist()]
            self._add(buffer + PADDING, begins[new], sizes[new], tokens)
        return tokens_of

    def _add(
        self, buffer: bytes, begins: Integers, sizes: Integers, tokens: Sequence[Sequence[int]]
    ) -> None:
        counts = np.fromiter(map(len, tokens), np.int64)
        total = int(counts.sum())
        if self._used + total > _MOST_TOKENS:
            return
        added = slice(self._words, self._words + len(begins))
        self._tokens[self._used : self._used + total] = [one for word in tokens for one in word]
        self._begins[added] = self._used + counts.cumsum() - counts
        self._counts[added], self._sizes[added] = counts, sizes
        for width, some in _by_width(sizes):
            keys = _keys(buffer, begins[some], sizes[some], width)
            entries = some + self._words
            self._keys[:width, entries] = keys
            # The slots last, as others read meanwhile.
            for slot, entry in zip(
                _first_slots(keys, sizes[some]).tolist(), entries.tolist(), strict=True
            ):
                while self._slots[slot]:
                    slot = (slot + 1) & (len(self._slots) - 1)
                self._slots[slot] = entry
        self._words, self._used = added.stop, self._used + total


def _by_width(sizes: Integers) -> Iterator[tuple[int, Integers]]:
    """Yield each width, in integers, with the words that are compared by so many."""
    shortest = 1
    for width in _WIDTHS:
        some = np.flatnonzero((sizes >= shortest) & (sizes <= 8 * width))
        shortest = 8 * width + 1
        if len(some):
            yield width, some


def _keys(buffer: bytes, begins: Integers, sizes: Integers, width: int) -> Keys:
    """Return the bytes of words as integers, shape (width, n)."""
    keys = np.empty((width, len(begins)), np.uint64)
    for at in range(width):
        # Eight bytes from every byte of the buffer on.
        places = len(buffer) - len(PADDING)
        eights = np.ndarray((places,), "<u8", buffer, offset=8 * at, strides=(1,))
        keys[at] = eights.take(begins)
        keys[at] &= _MASKS.take(np.minimum(np.maximum(sizes - 8 * at, 0), 8))
    return keys


def _first_slots(keys: Keys, sizes: Integers) -> Integers:
    """Find where the search for each word begins, shape (n,)."""
    mixed = sizes.astype(np.uint64)
    for part in keys:
        mixed ^= part
        mixed *= _MULTIPLIER
        mixed ^= mixed >> np.uint64(32)
    mixed *= _MULTIPLIER
    return (mixed >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)


def _cut(buffer: bytes, begins: Integers, sizes: Integers) -> list[bytes]:
    spans = zip(begins.tolist(), sizes.tolist(), strict=True)
    return [buffer[begin : begin + size] for begin, size in spans]


def _ranges(begins: Integers, counts: Integers) -> Integers:
    """Concatenate ranges: `counts` numbers from each of `begins` on."""
    before = counts.cumsum() - counts
    found: Integers = np.repeat(begins - before, counts)
    found += np.arange(len(found))
    return found
