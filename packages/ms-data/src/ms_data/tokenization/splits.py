"""Where the words of published pre-tokenizers begin, found for a whole batch at once.

A word is what a tokenizer's model is given at a time. Each character is put into one of a few
classes, and the classes of a character and its neighbours say whether a word begins at it: a
table, looked up for all characters together. What reaches further than the neighbours (runs of
digits, lines of blanks, contractions) is mended at the few places where it occurs. The classes
are asked of the regular expressions of the `tokenizers` library itself, so that they are those of
its Unicode version.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import tokenizers
from attrs import frozen
from numpy.typing import NDArray

Classes: TypeAlias = NDArray[np.uint8]
"""The class of each character, shape (n,); texts stand between characters of the class EDGE."""
Codes: TypeAlias = NDArray[np.integer]
"""The code points of the same characters, shape (n,)."""
Starts: TypeAlias = NDArray[np.bool_]
"""Whether a word begins at a character, shape (n,)."""

OTHER, LETTER, NUMBER, SPACE, BLANK, NEWLINE, EDGE = range(7)
KNOWN_CODES = 0x34000
"""Characters below it have a class; those above are private, unassigned or tags."""

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_META_SPACE = "\u2581"


@frozen
class WordSplit:
    """One way to cut text into words."""

    name: str
    begins: NDArray[np.bool_]
    """By the classes of two characters before, the character and the next one: 4 x 3 bits."""
    classes: Callable[[], Classes]
    """Gives the class of each code point below KNOWN_CODES."""
    mend: Callable[[Classes, Codes, Starts], None]
    """Corrects the starts where neighbours don't decide."""
    unknown: tuple[str, ...] = ()
    """A text with one of these is not cut here."""
    spaces: tuple[str, ...] = ()
    """A text that begins with none of these is given a leading space; empty adds none."""

    def starts(self, classes: Classes, codes: Codes) -> Starts:
        """Find where words begin; an EDGE is a word of its own."""
        starts = np.ones(len(classes), np.bool_)
        key = classes[:-3].astype(np.uint16)
        for at in (1, 2, 3):
            key <<= 3
            key |= classes[at : len(classes) - 3 + at]
        starts[2:-1] = self.begins.take(key)
        self.mend(classes, codes, starts)
        return starts


def split_of(pre_tokenizer: dict[str, Any] | None) -> WordSplit | str:
    """Find the split of a tokenizer's pre-tokenizer, as its file has it, or why there is none."""
    match pre_tokenizer:
        case None:
            return "the tokenizer has no pre-tokenizer, so that a whole text is one word"
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": prefix}:
            return _gpt2(prefix)
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"} as first,
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        } if not first.get("invert"):
            for digits, written in ((1, r"\p{N}"), (3, r"\p{N}{1,3}")):
                if pattern == _CL100K.replace("DIGITS", written):
                    return _cl100k(digits)
            return "the regular expression of its pre-tokenizer is none that is known"
        case {
            "type": "Metaspace",
            "replacement": "\u2581",
            "split": True,
            "prepend_scheme": scheme,
        }:
            return _metaspace(scheme != "never")
        case {"type": kind}:
            return f"its pre-tokenizer is {kind} with settings of its own"
    return "its pre-tokenizer is of an unknown kind"


@lru_cache
def _gpt2(prefix: bool) -> WordSplit:
    r"""Build the split of GPT-2.

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    """

    def begins(_: int, before: int, one: int, after: int) -> bool:
        if EDGE in (one, before):
            return True
        if one >= SPACE:  # the last blank of a run goes with what follows
            return before < SPACE or after < SPACE
        return before not in (SPACE, one)

    def mend(classes: Classes, codes: Codes, starts: Starts) -> None:
        _cut_contractions(codes, starts, any_case=False)

    spaces = (" ",) if prefix else ()
    return WordSplit("GPT-2", _table(begins), unicode_classes, mend, spaces=spaces)


@lru_cache
def _cl100k(digits: int) -> WordSplit:
    """Cut by cl100k's expression, as Llama 3 and Qwen 2 do, with so many digits in a word."""

    def begins(two_before: int, before: int, one: int, after: int) -> bool:
        if EDGE in (one, before):
            return True
        if one == LETTER:  # takes one sign or blank before it along, but not the last of several
            return before in (NUMBER, NEWLINE) or (before == OTHER and two_before in (OTHER, SPACE))
        if one == NUMBER:
            return digits == 1 or before != NUMBER
        if one == OTHER:
            return before not in (OTHER, SPACE)
        if one == NEWLINE:  # goes with signs and blanks before it
            return before in (LETTER, NUMBER)
        return before not in (SPACE, BLANK) or after < SPACE

    def mend(classes: Classes, codes: Codes, starts: Starts) -> None:
        if digits > 1:
            _cut_numbers(classes, starts, digits)
        _join_empty_lines(classes, starts)
        _cut_contractions(codes, starts, any_case=True)

    # The long s is an s to an expression that doesn't look at the case.
    name = f"cl100k, {digits} {'digits' if digits > 1 else 'digit'} a word"
    return WordSplit(name, _table(begins), unicode_classes, mend, unknown=("'\u017f",))


@lru_cache
def _metaspace(prefix: bool) -> WordSplit:
    """Begin a word before each space."""

    def begins(_: int, before: int, one: int, after: int) -> bool:
        return one == SPACE or EDGE in (one, before)

    def classes() -> Classes:
        found = np.full(KNOWN_CODES, OTHER, np.uint8)
        found[[ord(" "), ord(_META_SPACE)]] = SPACE
        return found

    def mend(classes: Classes, codes: Codes, starts: Starts) -> None:
        pass

    spaces = (" ", _META_SPACE) if prefix else ()
    return WordSplit("Metaspace", _table(begins), lru_cache(classes), mend, spaces=spaces)


def _table(begins: Callable[[int, int, int, int], bool]) -> NDArray[np.bool_]:
    keys = ((at >> 9, at >> 6 & 7, at >> 3 & 7, at & 7) for at in range(1 << 12))
    return np.array([begins(*key) for key in keys])


@lru_cache
def unicode_classes() -> Classes:
    """Ask the expressions of the `tokenizers` library for the class of each code point."""
    surrogates = range(0xD800, 0xE000)
    known = [code for code in range(KNOWN_CODES) if code not in surrogates]
    codes = np.array(known, np.uint32)
    classes = np.full(KNOWN_CODES, OTHER, np.uint8)
    # Runs of any class first, so that the slow expressions look at one character of each.
    runs = _matches(r"\p{L}+|\p{N}+|\s+", "".join(map(chr, known)))
    for begin, end in runs:
        one = chr(known[begin])
        for kind, pattern in ((LETTER, r"\p{L}"), (NUMBER, r"\p{N}"), (BLANK, r"\s")):
            if _matches(pattern, one):
                classes[codes[begin:end]] = kind
    classes[ord(" ")] = SPACE
    classes[[ord("\n"), ord("\r")]] = NEWLINE
    return classes


def _matches(pattern: str, text: str) -> list[tuple[int, int]]:
    """Return the places in a text that a pattern of the `tokenizers` library matches."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed")
    between = [place for _, place in split.pre_tokenize_str(text)]
    edges = [0, *(edge for place in between for edge in place), len(text)]
    places = zip(edges[::2], edges[1::2], strict=True)
    return [(begin, end) for begin, end in places if begin < end]


def _cut_contractions(codes: Codes, starts: Starts, *, any_case: bool) -> None:
    """Make 's, 't, 're, 've, 'm, 'll and 'd words where an apostrophe begins one."""
    at = np.flatnonzero(starts & (codes == ord("'")))
    last, bit = len(codes) - 1, 0x20 if any_case else 0
    first = codes[np.minimum(at + 1, last)] | bit
    second = codes[np.minimum(at + 2, last)] | bit
    one = np.isin(first, [ord(letter) for letter in "stmd"])
    two = np.zeros(len(at), np.bool_)
    for pair in ("re", "ve", "ll"):
        two |= (first == ord(pair[0])) & (second == ord(pair[1]))
    starts[at[one | two] + 1] = False
    starts[at[one] + 2] = True
    starts[at[two] + 3] = True


def _cut_numbers(classes: Classes, starts: Starts, digits: int) -> None:
    """Begin a word after every so many digits of a run."""
    number = classes == NUMBER
    begin = np.flatnonzero(number[1:] & ~number[:-1]) + 1
    end = np.flatnonzero(number[:-1] & ~number[1:]) + 1
    begin = begin + digits
    while len(begin := begin[inside := begin < end]):
        end = end[inside]
        starts[begin] = True
        begin = begin + digits


def _join_empty_lines(classes: Classes, starts: Starts) -> None:
    """Join blanks between two ends of lines to the first, unless that one belongs to signs."""
    blank = (classes == SPACE) | (classes == BLANK)
    newline = classes == NEWLINE
    begin = np.flatnonzero(blank[1:] & newline[:-1]) + 1
    ends = np.flatnonzero(blank[:-1] & ~blank[1:]) + 1
    end = ends[np.searchsorted(ends, begin)] if len(begin) else begin
    begin = begin[newline[end]]
    lines = np.flatnonzero(newline[1:] & ~newline[:-1]) + 1
    line = lines[np.searchsorted(lines, begin, side="left") - 1] if len(begin) else begin
    starts[begin[classes[line - 1] != OTHER]] = False
