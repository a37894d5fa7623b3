"""Hash table of the tokens of known words, with lookups of many words at a time.

An open-addressing table in arrays. Words are compared by all their bytes, as a few 8-byte integers,
so different words are never confused. The size is fixed; words that do not fit, or are too long,
are encoded again every time.
"""

from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

MAX_WORD_LENGTH = 64
"""Longest word in the table, in bytes."""
PADDING = b"\0" * MAX_WORD_LENGTH
"""Bytes that must follow the words in a buffer."""

_SLOT_BITS, _MAX_WORDS, _MAX_TOKENS = 20, 1 << 18, 1 << 21
_WIDTHS = (1, 2, MAX_WORD_LENGTH // 8)
"""Integers per word comparison: words of up to 8, 16 and 64 bytes."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)

Integers: TypeAlias = NDArray[np.int64]
Tokens: TypeAlias = NDArray[np.uint32]
Keys: TypeAlias = NDArray[np.uint64]
"""Bytes of words as integers, padded with zeros, shape (width, n)."""


class WordTable:
    """Cache of the tokens of words; safe for several threads.

    Args:
        encode: returns the tokens of a list of words; called once for every word in the table.
    """

    def __init__(self, encode: Callable[[Sequence[bytes]], Sequence[Sequence[int]]]) -> None:
        self._encode = encode
        self._lock = Lock()
        # Entry 0 means no word. np.zeros allocates memory only for pages that are written.
        self._slots = np.zeros(1 << _SLOT_BITS, np.int32)
        self._keys = np.zeros((_WIDTHS[-1], _MAX_WORDS), np.uint64)
        self._sizes = np.zeros(_MAX_WORDS, np.uint8)
        self._begins = np.zeros(_MAX_WORDS, np.int64)
        self._counts = np.zeros(_MAX_WORDS, np.int64)
        self._tokens = np.zeros(_MAX_TOKENS, np.uint32)
        self._words, self._used = 1, 0

    def encode(self, buffer: bytes, begins: Integers, sizes: Integers) -> tuple[Tokens, Integers]:
        """Encode words of a buffer.

        Args:
            buffer: the words, followed by `PADDING`.
            begins: offset of every word, shape (n,).
            sizes: bytes of every word, at least 1, shape (n,).

        Returns:
            Concatenated tokens of all words, and the number of tokens per word, shape (n,).
        """
        entries = self._find(buffer, begins, sizes)  # (n,)
        counts = self._counts.take(entries)
        missing = np.flatnonzero(entries == 0)
        new_tokens: list[Sequence[int]] = []
        if len(missing):
            words = _cut(buffer, begins[missing], sizes[missing])
            tokens_of = self._learn(list(dict.fromkeys(words)))
            new_tokens = [tokens_of[word] for word in words]
            counts[missing] = [len(ids) for ids in new_tokens]
        before = counts.cumsum() - counts
        # Missing words get arbitrary tokens here, which are overwritten below.
        indices = _ranges(self._begins.take(entries), counts)
        tokens = self._tokens.take(indices, mode="clip")
        if new_tokens:
            indices = _ranges(before[missing], counts[missing])
            tokens[indices] = np.fromiter((token for ids in new_tokens for token in ids), np.uint32)
        return tokens, counts

    def _find(self, buffer: bytes, begins: Integers, sizes: Integers) -> Integers:
        """Return the entry of every word, shape (n,); 0 if it is not in the table."""
        entries = np.zeros(len(begins), np.int64)
        for width, selected in _by_width(sizes):
            selected_sizes = sizes.take(selected)
            keys = _keys(buffer, begins.take(selected), selected_sizes, width)
            entries[selected] = self._look_up(keys, selected_sizes)
        return entries

    def _look_up(self, keys: Keys, sizes: Integers) -> Integers:
        slots = _first_slots(keys, sizes)
        entries: Integers = self._slots.take(slots).astype(np.int64)
        pending = np.flatnonzero((entries != 0) & ~self._matches(entries, keys, sizes))
        while len(pending):  # linear probing: another word has the slot, so try the next one
            slots[pending] = (slots[pending] + 1) & (len(self._slots) - 1)
            candidates = self._slots[slots[pending]].astype(np.int64)
            entries[pending] = candidates
            pending = pending[
                (candidates != 0) & ~self._matches(candidates, keys[:, pending], sizes[pending])
            ]
        return entries

    def _matches(self, entries: Integers, keys: Keys, sizes: Integers) -> NDArray[np.bool_]:
        """Return whether every entry is the given word, shape (n,)."""
        equal: NDArray[np.bool_] = self._sizes.take(entries) == sizes
        for index, part in enumerate(keys):
            equal &= self._keys[index].take(entries) == part
        return equal

    def _learn(self, words: Sequence[bytes]) -> dict[bytes, Sequence[int]]:
        """Encode distinct words, and store them while there is space."""
        tokens_of = dict(zip(words, self._encode(words), strict=True))
        with self._lock:
            free_entries = _MAX_WORDS - self._words
            # words that fit in the table
            short = [word for word in words if len(word) <= MAX_WORD_LENGTH][:free_entries]
            buffer, sizes = b"".join(short), np.fromiter(map(len, short), np.int64)
            begins = sizes.cumsum() - sizes
            # Another thread may have added some already.
            new = np.flatnonzero(self._find(buffer + PADDING, begins, sizes) == 0)
            tokens = [tokens_of[short[index]] for index in new.tolist()]
            self._add(buffer + PADDING, begins[new], sizes[new], tokens)
        return tokens_of

    def _add(
        self, buffer: bytes, begins: Integers, sizes: Integers, tokens: Sequence[Sequence[int]]
    ) -> None:
        counts = np.fromiter(map(len, tokens), np.int64)
        total = int(counts.sum())
        if self._used + total > _MAX_TOKENS:
            return
        added = slice(self._words, self._words + len(begins))
        self._tokens[self._used : self._used + total] = [token for ids in tokens for token in ids]
        self._begins[added] = self._used + counts.cumsum() - counts
        self._counts[added], self._sizes[added] = counts, sizes
        for width, selected in _by_width(sizes):
            keys = _keys(buffer, begins[selected], sizes[selected], width)
            entries = selected + self._words
            self._keys[:width, entries] = keys
            # Write the slots last, because other threads read without the lock.
            for slot, entry in zip(
                _first_slots(keys, sizes[selected]).tolist(), entries.tolist(), strict=True
            ):
                while self._slots[slot]:
                    slot = (slot + 1) & (len(self._slots) - 1)
                self._slots[slot] = entry
        self._words, self._used = added.stop, self._used + total


def _by_width(sizes: Integers) -> Iterator[tuple[int, Integers]]:
    """Yield every width (in integers) with the indices of its words."""
    shortest = 1
    for width in _WIDTHS:
        selected = np.flatnonzero((sizes >= shortest) & (sizes <= 8 * width))
        shortest = 8 * width + 1
        if len(selected):
            yield width, selected


def _keys(buffer: bytes, begins: Integers, sizes: Integers, width: int) -> Keys:
    """Return the bytes of words as integers, shape (width, n)."""
    keys = np.empty((width, len(begins)), np.uint64)
    for index in range(width):
        # A view of 8 bytes starting at every byte of the buffer.
        positions = len(buffer) - len(PADDING)
        words64 = np.ndarray((positions,), "<u8", buffer, offset=8 * index, strides=(1,))
        keys[index] = words64.take(begins)
        # clear bytes after the word
        keys[index] &= _MASKS.take(np.minimum(np.maximum(sizes - 8 * index, 0), 8))
    return keys


def _first_slots(keys: Keys, sizes: Integers) -> Integers:
    """Return the first slot of every word, shape (n,)."""
    hashes = sizes.astype(np.uint64)
    for part in keys:
        hashes ^= part
        hashes *= _MULTIPLIER
        hashes ^= hashes >> np.uint64(32)
    hashes *= _MULTIPLIER
    return (hashes >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)


def _cut(buffer: bytes, begins: Integers, sizes: Integers) -> list[bytes]:
    spans = zip(begins.tolist(), sizes.tolist(), strict=True)
    return [buffer[begin : begin + size] for begin, size in spans]


def _ranges(begins: Integers, counts: Integers) -> Integers:
    """Concatenate ranges of `counts` integers starting at `begins`."""
    before = counts.cumsum() - counts
    result: Integers = np.repeat(begins - before, counts)
    result += np.arange(len(result))
    return result
