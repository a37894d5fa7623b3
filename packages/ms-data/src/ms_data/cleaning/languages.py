"""Language identification: Chinese, Japanese and Korean by script, other languages by a library.

Simplified and traditional Chinese are distinguished without a table, by characters that only GB
2312 or only Big5 contains.
"""

import re
from functools import cache
from typing import Any

from ms_data.cleaning.words import HAN, HANGUL, KANA
from ms_data.errors import SettingError

SAMPLE_CHARACTERS = 4000
LETTERS_PER_CHARACTER = 3
"""Weight of a Chinese character relative to a letter."""

UNKNOWN = "unknown"

_HAN, _KANA, _HANGUL = (re.compile(f"[{script}]") for script in (HAN, KANA, HANGUL))
_LETTER = re.compile(r"[^\W\d_]")


def identify(text: str) -> str:
    """Return the ISO 639-1 code of a text's language, judging by its beginning, or "unknown".

    Raises:
        SettingError: the script is not conclusive, and resiliparse is not installed.
    """
    sample = text[:SAMPLE_CHARACTERS]
    letters = len(_LETTER.findall(sample))
    if not letters:
        return UNKNOWN
    if sample.isascii():
        return _identify_by_letters(sample)
    han, kana, hangul = (len(script.findall(sample)) for script in (_HAN, _KANA, _HANGUL))
    others = letters - han - kana - hangul
    if LETTERS_PER_CHARACTER * (han + kana + hangul) < others:  # mostly other scripts
        return _identify_by_letters(sample)
    if hangul > han + kana:  # Korean text may contain Chinese characters
        return "ko"
    return "ja" if 10 * kana > han + kana else "zh"  # Japanese text nearly always has kana


def chinese_script(text: str) -> str:
    """Return "simplified" or "traditional", or "unknown" if a text shows neither."""
    characters = set(_HAN.findall(text[: 4 * SAMPLE_CHARACTERS]))
    simplified = sum(_is_simplified(character) for character in characters)
    traditional = sum(_is_traditional(character) for character in characters)
    if simplified == traditional:
        return UNKNOWN
    return "simplified" if simplified > traditional else "traditional"


@cache
def _is_simplified(character: str) -> bool:
    return _encodes(character, "gb2312") and not _encodes(character, "big5")


@cache
def _is_traditional(character: str) -> bool:
    return _encodes(character, "big5") and not _encodes(character, "gb2312")


def _encodes(character: str, encoding: str) -> bool:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


@cache
def language_detector() -> Any:
    """Return the function that detects languages by their letters.

    Raises:
        SettingError: its library is not installed.
    """
    try:
        from resiliparse.parse.lang import detect_fast
    except ImportError as error:
        raise SettingError(
            "language detection needs resiliparse; install it with `pip install 'ms-data[clean]'`"
        ) from error
    return detect_fast


def _identify_by_letters(sample: str) -> str:
    language: str = language_detector()(sample)[0]
    return language
