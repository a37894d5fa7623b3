"""Word splitters, for the published rules that count words."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from ms_data.errors import SettingError

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
KANA = "\u3040-\u30ff\u31f0-\u31ff"
HANGUL = "\uac00-\ud7af\u1100-\u11ff"

Splitter = Callable[[str], list[str]]

# A word with its apostrophe; dots; dashes; one Chinese or Japanese character; another sign.
_PLAIN = re.compile(
    rf"[^\W{HAN}{KANA}]+(?:['\u2019][^\W\d_]+)?|\.{{2,}}|-{{2,}}|[{HAN}{KANA}]|[^\w\s]"
)
_MAX_CACHED_CHARACTERS = 64
_CACHE_ENTRIES = 1 << 18


def plain_words(text: str) -> list[str]:
    """Split text into runs of letters and digits, and single signs.

    An apostrophe is part of a word, consecutive dots or dashes form one word, and every Chinese or
    Japanese character is a word. Only white space is dropped.
    """
    return _PLAIN.findall(text)


class SpacyWords:
    """Words of spaCy's English tokenizer, which datatrove uses for English.

    The tokenizer works on pieces between white space, so every piece is split once and cached.
    """

    def __init__(self) -> None:
        self._tokenizer = _spacy_tokenizer()
        self._cache: dict[str, list[str]] = {}

    def __call__(self, text: str) -> list[str]:
        """Split a text into words."""
        cached = self._cache
        words: list[str] = []
        for piece in text.split():
            piece_words = cached.get(piece)
            if piece_words is None:
                piece_words = self._split(piece)
            words += piece_words
        return words

    def _split(self, piece: str) -> list[str]:
        words = [token.text for token in self._tokenizer(piece)]
        words = [word.strip() for word in words if word.strip()]
        if len(piece) <= _MAX_CACHED_CHARACTERS:
            if len(self._cache) >= _CACHE_ENTRIES:  # start over instead of tracking usage
                self._cache.clear()
            self._cache[piece] = words
        return words


SPLITTERS = ("plain", "spacy")


@cache
def splitter(name: str) -> Splitter:
    """Return the splitter with a name of `SPLITTERS`.

    Raises:
        SettingError: its library is not installed.
    """
    return SpacyWords() if name == "spacy" else plain_words


def _spacy_tokenizer() -> Any:
    try:
        import spacy
    except ImportError as error:
        raise SettingError(
            'words = "spacy" needs spaCy; install it with `pip install spacy`, or use "plain"'
        ) from error
    return spacy.blank("en").tokenizer
