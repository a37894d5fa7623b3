"""Splits text into words, which the published rules count."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from ms_data.errors import SettingError

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA = "\u3040-\u30ff\u31f0-\u31ff"
HANGUL = "\uac00-\ud7af\u1100-\u11ff"

Splitter = Callable[[str], list[str]]

_PLAIN = re.compile(
    rf"[^\W{HAN}{KANA}]+(?:['\u2019][^\W\d_]+)?|\.{{2,}}|-{{2,}}|[{HAN}{KANA}]|[^\w\s]"
)
_CHUNK_CHARACTERS = 64
_KEPT_CHUNKS = 1 << 18


def plain_words(text: str) -> list[str]:
    """Split text into runs of letters and digits, and single signs.

    An apostrophe stays within a word, dots and dashes in a row are one, and each Chinese or
    Japanese character is a word. No character but white space is lost.
    """
    return _PLAIN.findall(text)


class SpacyWords:
    """The words of spaCy's English tokenizer, which datatrove takes for English.

    That tokenizer works on what stands between white space, so that each such piece is split once
    and remembered.
    """

    def __init__(self) -> None:
        self._tokenizer = _spacy_tokenizer()
        self._known: dict[str, list[str]] = {}

    def __call__(self, text: str) -> list[str]:
        """Split a text into words."""
        known = self._known
        words: list[str] = []
        for piece in text.split():
            found = known.get(piece)
            if found is None:
                found = self._split(piece)
            words += found
        return words

    def _split(self, piece: str) -> list[str]:
        found = [token.text for token in self._tokenizer(piece)]
        found = [word.strip() for word in found if word.strip()]
        if len(piece) <= _CHUNK_CHARACTERS:
            if len(self._known) >= _KEPT_CHUNKS:
                self._known.clear()
            self._known[piece] = found
        return found


SPLITTERS = ("plain", "spacy")


@cache
def splitter(name: str) -> Splitter:
    """Return a splitter by its name in `SPLITTERS`.

    Raises:
        SettingError: its library is not installed.
    """
    return SpacyWords() if name == "spacy" else plain_words


def _spacy_tokenizer() -> Any:
    try:
        import spacy
    except ImportError as error:
        raise SettingError(
            'words = "spacy" needs spaCy; install it with `pip install spacy`, or take "plain"'
        ) from error
    return spacy.blank("en").tokenizer
