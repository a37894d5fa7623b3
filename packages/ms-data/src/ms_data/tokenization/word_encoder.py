"""Encodes documents word by word with a table of known words, and verifies a sample.

A tokenizer splits a text into words, and its model encodes every word independently, so a word
always has the same tokens. If `splits` supports the pre-tokenizer, a batch of documents is split at
once, and the tokenizer's model encodes each distinct word only once. The result is compared with
the library for the first documents and for about every 512th document, chosen by a hash of its
text.

Documents that contain an added token, or characters of unknown class, are left to the library.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray

from ms_data.errors import DataError, printable
from ms_data.tokenization.splits import EDGE, KNOWN_CODES, WordSplit, find_split
from ms_data.tokenization.word_table import PADDING, Tokens, WordTable

GROUP_CHARACTERS = 1 << 17
"""Text split at a time, so that the arrays stay in a core's cache."""
MAX_WORD_CHARACTERS = 1 << 20
"""Longest text without a split point that is encoded as one word."""
VERIFIED_FIRST = 1 << 18
"""Documents within the first 2¹⁸ characters of a corpus are all verified; longer ones never are."""
VERIFIED_ONE_IN = 512
"""One in this many other documents is verified."""

_ASCII_SAFE = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that do not change ASCII, and that can be applied separately to the parts of a text
cut next to ASCII."""


class WordsDifferError(DataError, RuntimeError):
    """The word encoder and the `tokenizers` library disagree about a document."""


class WordEncoder:
    """Encodes documents like `encode_batch`, several times faster.

    Args:
        model: tokenizer of the library, without truncation, padding and dropout, that encodes
            special tokens as plain text.

    Raises:
        ValueError: the pre-tokenizer is not supported; gives the reason.
    """

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        spec: dict[str, Any] = json.loads(model.to_str())
        split = find_split(spec["pre_tokenizer"])
        if isinstance(split, str):
            raise ValueError(split)
        self.split: WordSplit = split
        self._model = model
        self._normalizer = spec["normalizer"]
        # Added tokens are split off before words, which is not reproduced here.
        self._added = [token["content"] for token in spec["added_tokens"] if not token["special"]]
        words = _word_model(spec)
        self._table = WordTable(lambda batch: _encode(words, [word.decode() for word in batch]))
        self._unverified = VERIFIED_FIRST

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode texts, shape (n,) each.

        Raises:
            WordsDifferError: the tokens of a verified text differ from the library's.
        """
        plain = [self._prepare(text) for text in texts]
        parts: list[list[Tokens]] = [[] for _ in texts]
        for group in _groups(plain):
            for (index, _), tokens in zip(group, self._encode_group(group), strict=True):
                parts[index].append(tokens)
        for index, text in enumerate(plain):
            if text is None:
                parts[index] = [np.array(_encode(self._model, [texts[index]])[0], np.uint32)]
        encoded = [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in parts]
        self._verify(texts, encoded)
        return encoded

    def _prepare(self, text: str) -> str | None:
        """Normalize a text for splitting; None if the library must encode it."""
        if any(token in text for token in self._added):
            return None
        if self._normalizer is not None:
            text = self._normalize(text)
            if any(token in text for token in self._added):
                return None
        if not text or any(sequence in text for sequence in self.split.unknown):
            return None
        if not text.isascii() and _codes(text).max() >= KNOWN_CODES:
            return None
        return f" {text}" if self.split.spaces and not text.startswith(self.split.spaces) else text

    def _normalize(self, text: str) -> str:
        if self._normalizer["type"] not in _ASCII_SAFE:
            return str(self._model.normalizer.normalize_str(text))
        if text.isascii():
            return text
        return "".join(self._model.normalizer.normalize_str(part) for part in _cut(text))

    def _encode_group(self, group: Sequence[tuple[int, str]]) -> list[Tokens]:
        """Encode parts of texts together, shape (n,) each."""
        # Parts are separated by NUL characters of class EDGE, which are words and removed below.
        text = "".join(("\0", *(f"{part}\0" for _, part in group)))
        edges = np.cumsum([0, *(len(part) + 1 for _, part in group)])
        codes = np.frombuffer(text.encode(), np.uint8) if text.isascii() else _codes(text)
        classes = self.split.classes().take(codes)
        # Classes of NUL characters in a text differ from the separators' class.
        classes[edges] = EDGE
        starts = np.flatnonzero(self.split.starts(classes, codes))
        edge_words = np.searchsorted(starts, edges)
        if not text.isascii():
            starts = _byte_offsets(codes)[starts]
        sizes = np.diff(starts, append=starts[-1] + 1)  # bytes per word
        words = np.delete(np.arange(len(starts)), edge_words)
        buffer = text.encode() + PADDING
        tokens, counts = self._table.encode(buffer, starts[words], sizes[words])
        # Token offsets at the separators, which were removed from the words.
        ends = np.concatenate(([0], counts.cumsum()))[edge_words - np.arange(len(edge_words))]
        return np.split(tokens, ends[1:-1])

    def _verify(self, texts: Sequence[str], encoded: Sequence[Tokens]) -> None:
        """Compare a sample of the texts with the library's tokens."""
        for text, tokens in zip(texts, encoded, strict=True):
            first, self._unverified = self._unverified > 0, self._unverified - len(text)
            sampled = xxhash.xxh3_64_intdigest(text.encode()) % VERIFIED_ONE_IN == 0
            if len(text) > VERIFIED_FIRST or not (first or sampled):
                continue
            if tokens.tolist() != _encode(self._model, [text])[0]:
                raise WordsDifferError(
                    f"encoded word by word ({self.split.name}), {printable(text)!r} has other "
                    "tokens than with the tokenizers library"
                )


def _word_model(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the model without pre-tokenization, for words that are already split."""
    metaspace: dict[str, Any] = {"type": "Metaspace", "replacement": "\u2581", "split": False}
    if spec["pre_tokenizer"]["type"] == "Metaspace":
        pre_tokenizer = metaspace | {"prepend_scheme": "never"}
    else:
        pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        pre_tokenizer["trim_offsets"] = True
    overrides: dict[str, Any] = {"normalizer": None, "post_processor": None, "added_tokens": []}
    document = json.dumps(spec | overrides | {"pre_tokenizer": pre_tokenizer})
    try:
        model: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(document)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"its model cannot be serialized ({printable(error)})") from error
    return model


def _encode(model: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in model.encode_batch_fast(texts, add_special_tokens=False)]


def _groups(texts: Sequence[str | None]) -> Iterator[list[tuple[int, str]]]:
    """Yield groups of (text index, part of the text) with about GROUP_CHARACTERS in total."""
    group: list[tuple[int, str]] = []
    size = 0
    for index, text in enumerate(texts):
        for part in _cut(text) if text is not None else ():
            group.append((index, part))
            size += len(part)
            if size >= GROUP_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _cut(text: str) -> Iterator[str]:
    """Cut a text before spaces that follow a non-space; every split starts a word there."""
    begin = 0
    while len(text) - begin > GROUP_CHARACTERS:
        cut = _last_cut(text, begin, begin + GROUP_CHARACTERS)
        if cut == begin or cut - begin > MAX_WORD_CHARACTERS:
            # The library needs 300 bytes per character of a word, so endless words are cut.
            cut = min(len(text), begin + MAX_WORD_CHARACTERS)
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _last_cut(text: str, begin: int, end: int) -> int:
    """Return the last cut point in a range, else the first one after it, else `begin`."""
    position = end
    while (position := text.rfind(" ", begin + 1, position)) > 0:
        if not text[position - 1].isspace():
            return position
    position = end - 1
    while (position := text.find(" ", position + 1)) > 0:
        if not text[position - 1].isspace():
            return position
    return begin


def _codes(text: str) -> NDArray[np.uint32]:
    """Return the code points of a text, shape (n,)."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _byte_offsets(codes: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the offset of every character in UTF-8, shape (n,)."""
    sizes = np.ones(len(codes), np.int64)
    for bound in (1 << 7, 1 << 11, 1 << 16):
        sizes += codes >= bound
    offsets: NDArray[np.int64] = sizes.cumsum() - sizes
    return offsets
