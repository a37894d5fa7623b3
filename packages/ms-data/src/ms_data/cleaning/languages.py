"""Tells the language of a text: Chinese, Japanese and Korean by script, the others by a library.

Chinese characters that only one of GB 2312 and Big5 holds tell simplified from traditional script:
no table is needed.
"""

import re
from functools import cache
from typing import Any

from ms_data.cleaning.words import HAN, HANGUL, KANA
from ms_data.errors import SettingError

SAMPLE_CHARACTERS = 4000
LETTERS_A_CHARACTER = 3
"""A Chinese character says about as much as three letters."""

UNKNOWN = "unknown"

_HAN, _KANA, _HANGUL = (re.compile(f"[{one}]") for one in (HAN, KANA, HANGUL))
_LETTER = re.compile(r"[^\W\d_]")


def identify(text: str) -> str:
    """Return the ISO 639-1 code of a text's language by its first characters, or "unknown".

    Raises:
        SettingError: the script does not tell it, and resiliparse is not installed.
    """
    sample = text[:SAMPLE_CHARACTERS]
    letters = len(_LETTER.findall(sample))
    if not letters:
        return UNKNOWN
    if sample.isascii():
        return _identify_by_letters(sample)
    han, kana, hangul = (len(one.findall(sample)) for one in (_HAN, _KANA, _HANGUL))
    others = letters - han - kana - hangul
    if LETTERS_A_CHARACTER * (han + kana + hangul) < others:
        return _identify_by_letters(sample)
    if hangul > han + kana:
        return "ko"
    return "ja" if 10 * kana > han + kana else "zh"


def chinese_script(text: str) -> str:
    """Tell "simplified" from "traditional" script; "unknown" where a text shows neither."""
    found = set(_HAN.findall(text[: 4 * SAMPLE_CHARACTERS]))
    simplified = sum(_is_simplified(one) for one in found)
    traditional = sum(_is_traditional(one) for one in found)
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
def detector() -> Any:
    """Return the function that tells languages by their letters.

    Raises:
        SettingError: its library is not installed.
    """
    try:
        from resiliparse.parse.lang import detect_fast
    except ImportError as error:
        raise SettingError(
            "to tell languages needs resiliparse; install it with `pip install 'ms-data[clean]'`"
        ) from error
    return detect_fast


def _identify_by_letters(sample: str) -> str:
    found: str = detector()(sample)[0]
    return found
