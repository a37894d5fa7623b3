"""A document as rules see it, with cached words, lines and language."""

import string
import unicodedata
from collections import Counter
from functools import cached_property

from ms_data.cleaning.languages import identify
from ms_data.cleaning.words import Splitter

_SENTENCE_ENDS = (
    0x21, 0x2E, 0x3F, 0x589, (0x61D, 0x61F), 0x6D4, (0x700, 0x702), 0x7F9, 0x837, 0x839,
    (0x83D, 0x83E), (0x964, 0x965), (0x104A, 0x104B), 0x1362, (0x1367, 0x1368), 0x166E,
    (0x1735, 0x1736), (0x17D4, 0x17D6), (0x17D9, 0x17DA), 0x1803, 0x1809, (0x1944, 0x1945),
    (0x1AA8, 0x1AAB), (0x1B5A, 0x1B5B), (0x1B5E, 0x1B5F), (0x1B7D, 0x1B7E), (0x1C3B, 0x1C3C),
    (0x1C7E, 0x1C7F), (0x203C, 0x203D), (0x2047, 0x2049), 0x2E2E, 0x2E3C, (0x2E53, 0x2E54), 0x3002,
    0xA4FF, (0xA60E, 0xA60F), 0xA6F3, 0xA6F7, (0xA876, 0xA877), (0xA8CE, 0xA8CF), 0xA92F,
    (0xA9C8, 0xA9C9), (0xAA5D, 0xAA5F), (0xAAF0, 0xAAF1), 0xABEB, 0xFE52, (0xFE56, 0xFE57), 0xFF01,
    0xFF0E, 0xFF1F, 0xFF61, (0x10A56, 0x10A57), (0x10F55, 0x10F59), (0x10F86, 0x10F89),
    (0x11047, 0x11048), (0x110BE, 0x110C1), (0x11141, 0x11143), (0x111C5, 0x111C6), 0x111CD,
    (0x111DE, 0x111DF), (0x11238, 0x11239), (0x1123B, 0x1123C), 0x112A9, (0x1144B, 0x1144C),
    (0x115C2, 0x115C3), (0x115C9, 0x115D7), (0x11641, 0x11642), (0x1173C, 0x1173E), 0x11944,
    0x11946, (0x11A42, 0x11A43), (0x11A9B, 0x11A9C), (0x11C41, 0x11C42), (0x11EF7, 0x11EF8),
    (0x11F43, 0x11F44), (0x16A6E, 0x16A6F), 0x16AF5, (0x16B37, 0x16B38), 0x16B44, 0x16E98, 0x1BC9F,
    0x1DA88,
)  # fmt: skip

SENTENCE_ENDS = frozenset(
    chr(code)
    for entry in _SENTENCE_ENDS
    for code in (range(entry[0], entry[1] + 1) if isinstance(entry, tuple) else (entry,))
)
"""Sentence-ending characters of all scripts: Unicode's Sentence_Terminal, and three Khmer signs."""

SIGNS = SENTENCE_ENDS.union(
    string.punctuation,
    map(chr, (*range(9), *range(11, 32), *range(127, 160))),
    "\u2013\u2014\u2019\u201c\u201d\u201e\u2026\u2236\u25ba\u00ab\u00b4\u00bb",
    "\u2501\u3001\u3008\u3009\u300a\u300b\u300c\u300d\u3010\u3011",
    "\uff05\uff08\uff09\uff0c\uff1a\uff1b\uff5e",
)
"""Punctuation and control characters; a word of these alone is not counted as a word."""


class Text:
    """A text with its words and lines."""

    def __init__(self, text: str, split: Splitter) -> None:
        self.text = text
        self.split = split

    @cached_property
    def words(self) -> list[str]:
        """Words in order."""
        return self.split(self.text)

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of occurrences of each word."""
        return Counter(self.words)

    @cached_property
    def lines(self) -> list[str]:
        """Lines, split like `str.splitlines`."""
        return self.text.splitlines()

    @cached_property
    def language(self) -> str:
        """ISO 639-1 code of the language, or "unknown"."""
        return identify(self.text)


def count_sentences(words: list[str]) -> int:
    """Count the sentences in a list of words.

    A sentence includes its end mark and all punctuation directly after it.
    """
    sentences, ended = 0, False
    for word in words:
        if word in SENTENCE_ENDS:
            ended = True
        elif ended and not _is_punctuation(word):
            sentences += 1
            ended = False
    return sentences + bool(words)  # the last sentence, ended or not


def repeats(parts: list[str]) -> tuple[int, int]:
    """Return the number of parts that occurred before, and their total characters."""
    counts = Counter(parts)
    if len(counts) == len(parts):
        return 0, 0
    # The first occurrence of a part is not a repetition.
    repeated = [(part, count - 1) for part, count in counts.items() if count > 1]
    return sum(count for _, count in repeated), sum(len(part) * count for part, count in repeated)


def _is_punctuation(word: str) -> bool:
    return not word[0].isalnum() and all(
        unicodedata.category(character)[0] == "P" for character in word
    )
