"""Encodes documents word by word from a table of words, and proves it on a sample of them.

A tokenizer cuts a text into words and its model encodes each word by itself, so that a word has
the same tokens wherever it stands. Where the cut is one that `splits` knows, a document is cut
there for a whole batch at once and each different word is encoded once, by the tokenizer's own
model. That the tokens are those of the library is proved on the first documents and on every
512th one, by its text.

What is left to the library: documents that spell an added token, and those with characters whose
class is not known.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray

from ms_data.errors import DataError, printable
from ms_data.tokenization.splits import EDGE, KNOWN_CODES, WordSplit, split_of
from ms_data.tokenization.word_table import PADDING, Tokens, WordTable

GROUP_CHARACTERS = 1 << 17
"""Text that is cut at once: what it needs stays in a core's cache."""
ENDLESS_CHARACTERS = 1 << 20
"""Longest text without a place to cut that is encoded as one word."""
PROVED_FIRST = 1 << 18
"""Characters of the first documents, all of which are proved."""
PROVED_ONE_IN = 512
"""One in so many of the other documents is proved, if it is no longer than these."""

_LIKE_ASCII = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that leave ASCII as it is, and text on both sides of a cut beside ASCII too."""


class WordsDifferError(DataError, RuntimeError):
    """The tokens of a document are not those of the `tokenizers` library."""


class WordEncoder:
    """Encodes documents as `encode_batch` does, several times faster.

    Args:
        model: a tokenizer of the library, without truncation, padding and dropout, that takes
            special tokens for plain text.

    Raises:
        ValueError: there is no known cut for this tokenizer; says why.
    """

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        spec: dict[str, Any] = json.loads(model.to_str())
        split = split_of(spec["pre_tokenizer"])
        if isinstance(split, str):
            raise ValueError(split)
        self.split: WordSplit = split
        self._model = model
        self._normalizer = spec["normalizer"]
        self._added = [token["content"] for token in spec["added_tokens"] if not token["special"]]
        words = _of_words(spec)
        self._table = WordTable(lambda some: _encode(words, [word.decode() for word in some]))
        self._unproved = PROVED_FIRST

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Encode each text, shape (n,) each.

        Raises:
            WordsDifferError: a text of the sample has other tokens than the library gives it.
        """
        plain = [self._prepared(text) for text in texts]
        parts: list[list[Tokens]] = [[] for _ in texts]
        for group in _groups(plain):
            for (at, _), tokens in zip(group, self._encode_group(group), strict=True):
                parts[at].append(tokens)
        for at, text in enumerate(plain):
            if text is None:
                parts[at] = [np.array(_encode(self._model, [texts[at]])[0], np.uint32)]
        found = [one[0] if len(one) == 1 else np.concatenate(one) for one in parts]
        self._prove(texts, found)
        return found

    def _prepared(self, text: str) -> str | None:
        """Return the text as it is cut; None where the library has to do it."""
        if any(token in text for token in self._added):
            return None
        if self._normalizer is not None:
            text = self._normalized(text)
            if any(token in text for token in self._added):
                return None
        if not text or any(one in text for one in self.split.unknown):
            return None
        if not text.isascii() and _codes(text).max() >= KNOWN_CODES:
            return None
        return f" {text}" if self.split.spaces and not text.startswith(self.split.spaces) else text

    def _normalized(self, text: str) -> str:
        if self._normalizer["type"] not in _LIKE_ASCII:
            return str(self._model.normalizer.normalize_str(text))
        if text.isascii():
            return text
        return "".join(self._model.normalizer.normalize_str(part) for part in _cut(text))

    def _encode_group(self, group: Sequence[tuple[int, str]]) -> list[Tokens]:
        """Encode parts of texts together, shape (n,) each."""
        text = "".join(("\0", *(f"{part}\0" for _, part in group)))
        edges = np.cumsum([0, *(len(part) + 1 for _, part in group)])
        codes = np.frombuffer(text.encode(), np.uint8) if text.isascii() else _codes(text)
        classes = self.split.classes().take(codes)
        classes[edges] = EDGE
        begins = np.flatnonzero(self.split.starts(classes, codes))
        between = np.searchsorted(begins, edges)
        if not text.isascii():
            begins = _byte_places(codes)[begins]
        sizes = np.diff(begins, append=begins[-1] + 1)
        words = np.delete(np.arange(len(begins)), between)
        buffer = text.encode() + PADDING
        tokens, counts = self._table.encode(buffer, begins[words], sizes[words])
        ends = np.concatenate(([0], counts.cumsum()))[between - np.arange(len(between))]
        return np.split(tokens, ends[1:-1])

    def _prove(self, texts: Sequence[str], found: Sequence[Tokens]) -> None:
        """Compare the texts of the sample with what the library makes of them."""
        for text, tokens in zip(texts, found, strict=True):
            first, self._unproved = self._unproved > 0, self._unproved - len(text)
            chosen = xxhash.xxh3_64_intdigest(text.encode()) % PROVED_ONE_IN == 0
            if len(text) > PROVED_FIRST or not (first or chosen):
                continue
            if tokens.tolist() != _encode(self._model, [text])[0]:
                raise WordsDifferError(
                    f"encoded word by word ({self.split.name}), {printable(text)!r} has other "
                    "tokens than the tokenizers library gives it"
                )


def _of_words(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the same model for words that are cut already."""
    kind: dict[str, Any] = {"type": "Metaspace", "replacement": "\u2581", "split": False}
    if spec["pre_tokenizer"]["type"] == "Metaspace":
        words = kind | {"prepend_scheme": "never"}
    else:
        words = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        words["trim_offsets"] = True
    plain: dict[str, Any] = {"normalizer": None, "post_processor": None, "added_tokens": []}
    document = json.dumps(spec | plain | {"pre_tokenizer": words})
    try:
        model: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(document)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"its model cannot be written again ({printable(error)})") from error
    return model


def _encode(model: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [one.ids for one in model.encode_batch_fast(texts, add_special_tokens=False)]


def _groups(texts: Sequence[str | None]) -> Iterator[list[tuple[int, str]]]:
    """Yield the parts of texts with their texts' numbers, so much text at a time."""
    group: list[tuple[int, str]] = []
    size = 0
    for at, text in enumerate(texts):
        for part in _cut(text) if text is not None else ():
            group.append((at, part))
            size += len(part)
            if size >= GROUP_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _cut(text: str) -> Iterator[str]:
    """Cut a text before spaces that follow another character, where every split begins a word."""
    begin = 0
    while len(text) - begin > GROUP_CHARACTERS:
        cut = _last_cut(text, begin, begin + GROUP_CHARACTERS)
        if cut == begin or cut - begin > ENDLESS_CHARACTERS:
            # The library takes 300 bytes for a character of one word, so that a word without end
            # is cut in its midst.
            cut = min(len(text), begin + ENDLESS_CHARACTERS)
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _last_cut(text: str, begin: int, end: int) -> int:
    """Return the last place in a range before which a text may be cut, or after it, or `begin`."""
    at = end
    while (at := text.rfind(" ", begin + 1, at)) > 0:
        if not text[at - 1].isspace():
            return at
    at = end - 1
    while (at := text.find(" ", at + 1)) > 0:
        if not text[at - 1].isspace():
            return at
    return begin


def _codes(text: str) -> NDArray[np.uint32]:
    """Return the text's code points, shape (n,)."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _byte_places(codes: NDArray[np.integer]) -> NDArray[np.int64]:
    """Find where each character begins in UTF-8, shape (n,)."""
    sizes = np.ones(len(codes), np.int64)
    for least in (1 << 7, 1 << 11, 1 << 16):
        sizes += codes >= least
    places: NDArray[np.int64] = sizes.cumsum() - sizes
    return places
