"""Vectorized word boundaries of published pre-tokenizers, for a whole batch at a time.

A word is the unit that a tokenizer's model encodes. Every character is mapped to a class, and a
lookup table decides from the classes of a character and its neighbors whether a word starts there.
Cases with a longer range (runs of digits, blank lines, contractions) are corrected afterwards at
the few places where they occur. The classes come from the regular expressions of the `tokenizers`
library itself, so they match its Unicode version.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import tokenizers
from attrs import frozen
from numpy.typing import NDArray

Classes: TypeAlias = NDArray[np.uint8]
"""Class of every character, shape (n,); texts are separated by characters of the class EDGE."""
Codes: TypeAlias = NDArray[np.integer]
"""Code points of the same characters, shape (n,)."""
Starts: TypeAlias = NDArray[np.bool_]
"""Whether a word starts at a character, shape (n,)."""

OTHER, LETTER, NUMBER, SPACE, BLANK, NEWLINE, EDGE = range(7)
KNOWN_CODES = 0x34000
"""Code points below this have a class; those above are private, unassigned or tags."""

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_META_SPACE = "\u2581"


@frozen
class WordSplit:
    """A rule for splitting text into words."""

    name: str
    begins: NDArray[np.bool_]
    """Lookup table over the classes of the two previous characters, the character and the next one:
    4 x 3 bits."""
    classes: Callable[[], Classes]
    """Returns the class of every code point below KNOWN_CODES."""
    fix_starts: Callable[[Classes, Codes, Starts], None]
    """Corrects the starts that neighbors cannot decide."""
    unknown: tuple[str, ...] = ()
    """Texts that contain one of these character sequences are encoded by the library."""
    spaces: tuple[str, ...] = ()
    """Texts that start with none of these get a leading space; empty adds none."""

    def starts(self, classes: Classes, codes: Codes) -> Starts:
        """Find the word starts; an EDGE character is a separate word."""
        starts = np.ones(len(classes), np.bool_)
        # key[i] packs the classes of characters i to i + 3; it decides about character i + 2.
        key = classes[:-3].astype(np.uint16)
        for offset in (1, 2, 3):
            key <<= 3
            key |= classes[offset : len(classes) - 3 + offset]
        # The first and last characters are EDGE; these and the second one always start words.
        starts[2:-1] = self.begins.take(key)
        self.fix_starts(classes, codes, starts)
        return starts


def find_split(pre_tokenizer: dict[str, Any] | None) -> WordSplit | str:
    """Return the split of a pre-tokenizer in a tokenizer file, or why it is not supported."""
    match pre_tokenizer:
        case None:
            return "the tokenizer has no pre-tokenizer, so every text is one word"
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": prefix}:
            return _gpt2(prefix)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"} as split,
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if not split.get("invert"):
            for digits, digit_pattern in ((1, r"\p{N}"), (3, r"\p{N}{1,3}")):
                if pattern == _CL100K.replace("DIGITS", digit_pattern):
                    return _cl100k(digits)
            return "the regular expression of its pre-tokenizer is unknown"
        case {
            "type": "Metaspace",
            "replacement": "\u2581",
            "split": True,
            "prepend_scheme": scheme,
        }:
            return _metaspace(scheme != "never")
        case {"type": type_name}:
            return f"its pre-tokenizer is {type_name} with unsupported settings"
    return "its pre-tokenizer has an unknown type"


@lru_cache
def _gpt2(prefix: bool) -> WordSplit:
    r"""Return the split of GPT-2.

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    """

    def begins(_: int, before: int, current: int, after: int) -> bool:
        if EDGE in (current, before):
            return True
        if current >= SPACE:  # the last blank of a run belongs to the next word
            return before < SPACE or after < SPACE
        return before not in (SPACE, current)

    def fix_starts(classes: Classes, codes: Codes, starts: Starts) -> None:
        _split_contractions(codes, starts, any_case=False)

    spaces = (" ",) if prefix else ()
    return WordSplit("GPT-2", _table(begins), unicode_classes, fix_starts, spaces=spaces)


@lru_cache
def _cl100k(digits: int) -> WordSplit:
    """Return the split of cl100k, as in Llama 3 and Qwen 2, with up to `digits` digits per word."""

    def begins(second_before: int, before: int, current: int, after: int) -> bool:
        if EDGE in (current, before):
            return True
        if current == LETTER:  # includes one preceding sign or blank, but not the last of several
            return before in (NUMBER, NEWLINE) or (
                before == OTHER and second_before in (OTHER, SPACE)
            )
        if current == NUMBER:
            return digits == 1 or before != NUMBER
        if current == OTHER:
            return before not in (OTHER, SPACE)
        if current == NEWLINE:  # belongs to the signs and blanks before it
            return before in (LETTER, NUMBER)
        return before not in (SPACE, BLANK) or after < SPACE

    def fix_starts(classes: Classes, codes: Codes, starts: Starts) -> None:
        if digits > 1:
            _split_numbers(classes, starts, digits)
        _join_blank_lines(classes, starts)
        _split_contractions(codes, starts, any_case=True)

    # A case-insensitive expression also matches the long s as an s.
    name = f"cl100k, {digits} {'digits' if digits > 1 else 'digit'} per word"
    return WordSplit(name, _table(begins), unicode_classes, fix_starts, unknown=("'\u017f",))


@lru_cache
def _metaspace(prefix: bool) -> WordSplit:
    """Return the split that starts a word before every space."""

    def begins(_: int, before: int, current: int, after: int) -> bool:
        return current == SPACE or EDGE in (current, before)

    def classes() -> Classes:
        table = np.full(KNOWN_CODES, OTHER, np.uint8)
        table[[ord(" "), ord(_META_SPACE)]] = SPACE
        return table

    def fix_starts(classes: Classes, codes: Codes, starts: Starts) -> None:
        pass

    spaces = (" ", _META_SPACE) if prefix else ()
    return WordSplit("Metaspace", _table(begins), lru_cache(classes), fix_starts, spaces=spaces)


def _table(begins: Callable[[int, int, int, int], bool]) -> NDArray[np.bool_]:
    keys = ((bits >> 9, bits >> 6 & 7, bits >> 3 & 7, bits & 7) for bits in range(1 << 12))
    return np.array([begins(*key) for key in keys])


@lru_cache
def unicode_classes() -> Classes:
    """Determine the class of every code point with the expressions of the `tokenizers` library."""
    surrogates = range(0xD800, 0xE000)
    code_points = [code for code in range(KNOWN_CODES) if code not in surrogates]
    codes = np.array(code_points, np.uint32)
    classes = np.full(KNOWN_CODES, OTHER, np.uint8)
    # Find runs of equal class first; then the slow expressions only test one character of each.
    runs = _matches(r"\p{L}+|\p{N}+|\s+", "".join(map(chr, code_points)))
    for begin, end in runs:
        char = chr(code_points[begin])
        for char_class, pattern in ((LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (BLANK, r"\s")):
            if _matches(pattern, char):
                classes[codes[begin:end]] = char_class
    classes[ord(" ")] = SPACE
    classes[[ord("\n"), ord("\r")]] = NEWLINE
    return classes


def _matches(pattern: str, text: str) -> list[tuple[int, int]]:
    """Return the spans that a pattern of the `tokenizers` library matches in a text."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed")
    gaps = [span for _, span in split.pre_tokenize_str(text)]
    edges = [0, *(edge for span in gaps for edge in span), len(text)]
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [(begin, end) for begin, end in spans if begin < end]


def _split_contractions(codes: Codes, starts: Starts, *, any_case: bool) -> None:
    """Make 's, 't, 're, 've, 'm, 'll and 'd words where an apostrophe starts a word."""
    apostrophes = np.flatnonzero(starts & (codes == ord("'")))
    last, bit = len(codes) - 1, 0x20 if any_case else 0  # bit 0x20 maps letters to lower case
    first = codes[np.minimum(apostrophes + 1, last)] | bit
    second = codes[np.minimum(apostrophes + 2, last)] | bit
    one_letter = np.isin(first, [ord(letter) for letter in "stmd"])
    two_letters = np.zeros(len(apostrophes), np.bool_)
    for pair in ("re", "ve", "ll"):
        two_letters |= (first == ord(pair[0])) & (second == ord(pair[1]))
    # the letters belong to the apostrophe
    starts[apostrophes[one_letter | two_letters] + 1] = False
    starts[apostrophes[one_letter] + 2] = True
    starts[apostrophes[two_letters] + 3] = True


def _split_numbers(classes: Classes, starts: Starts, digits: int) -> None:
    """Start a word after every `digits` digits of a run."""
    number = classes == NUMBER
    begin = np.flatnonzero(number[1:] & ~number[:-1]) + 1
    end = np.flatnonzero(number[:-1] & ~number[1:]) + 1
    begin = begin + digits
    while len(begin := begin[inside := begin < end]):
        end = end[inside]
        starts[begin] = True
        begin = begin + digits


def _join_blank_lines(classes: Classes, starts: Starts) -> None:
    """Join blanks between two line ends to the first one, unless that one belongs to signs."""
    # `\s*[\r\n]+` is greedy: it also takes blank lines after the first line end.
    blank = (classes == SPACE) | (classes == BLANK)
    newline = classes == NEWLINE
    begin = np.flatnonzero(blank[1:] & newline[:-1]) + 1
    ends = np.flatnonzero(blank[:-1] & ~blank[1:]) + 1
    end = ends[np.searchsorted(ends, begin)] if len(begin) else begin
    begin = begin[newline[end]]
    lines = np.flatnonzero(newline[1:] & ~newline[:-1]) + 1
    line = lines[np.searchsorted(lines, begin, side="left") - 1] if len(begin) else begin
    starts[begin[classes[line - 1] != OTHER]] = False
