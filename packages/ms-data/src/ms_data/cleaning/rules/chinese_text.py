"""Normalizes Chinese text: width, punctuation, spaces and script."""

import re
from functools import cache
from typing import Any

from attrs import field, frozen

from ms_data.cleaning.rule import Change, Outcome, Rule, as_tuple, library_version, texts
from ms_data.cleaning.text import Text
from ms_data.cleaning.words import HAN
from ms_data.errors import SettingError
from ms_data.settings import flag, one_of

_FULL_SIGNS = "\uff03\uff04\uff05\uff06\uff0a\uff0b\uff0d\uff0f\uff1c\uff1d\uff1e\uff20"
_WIDE = [*range(0xFF10, 0xFF1A), *range(0xFF21, 0xFF3B), *range(0xFF41, 0xFF5B)]
_NARROW = {code: code - 0xFEE0 for code in (*_WIDE, *map(ord, _FULL_SIGNS))} | {0x3000: 0x20}
_CHINESE_SIGNS = "\u3001\u3002\u300a\u300b\u300c\u300d\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
_SIGNS = dict(zip(",.?!;:", "\uff0c\u3002\uff1f\uff01\uff1b\uff1a", strict=True))
_SIGN = re.compile(rf"(?<=[{HAN}\u300b\u300d\uff09])([,.?!;:])(?![\w.,?!;:/\\-])|"
                   rf"(?<=[{HAN}])([,?!;:])(?=[{HAN}])")  # fmt: skip
_SPACES = re.compile(rf"(?<=[{HAN}{_CHINESE_SIGNS}])[ \t]+(?=[{HAN}{_CHINESE_SIGNS}])")


@frozen(kw_only=True)
class ChineseText(Rule):
    """Writes Chinese with the punctuation of GB/T 15834-2011; OpenCC converts between scripts."""

    name = "chinese_text"

    languages: tuple[str, ...] = field(default=("zh",), converter=as_tuple, validator=texts)
    """Languages that the rule applies to, as ISO 639-1 codes; empty: all."""
    width: bool = field(default=True, validator=flag)
    """Convert full-width letters, digits and spaces to ASCII."""
    punctuation: bool = field(default=True, validator=flag)
    """Convert commas, periods and similar signs after a Chinese character to full width."""
    spaces: bool = field(default=True, validator=flag)
    """Remove spaces between Chinese characters."""
    script: str = field(default="keep", validator=one_of("keep", "simplified", "traditional"))
    """Convert everything to one script; needs OpenCC (pip install 'ms-data[chinese]')."""

    def check(self) -> None:
        """Check that OpenCC is installed if scripts are converted."""
        super().check()
        if self.script != "keep":
            _converter(self.script)

    def identity(self) -> str:
        """Return the version of OpenCC if scripts are converted."""
        converted = library_version("OpenCC") if self.script != "keep" else ""
        return f"{super().identity()} {converted}".strip()

    def apply(self, text: Text, /) -> Outcome:
        """Return the normalized text."""
        body = text.text
        if body.isascii():
            return None
        if self.width:
            body = body.translate(_NARROW)
        if self.punctuation:
            body = _SIGN.sub(lambda match: _SIGNS[match[0]], body)
        if self.spaces:
            body = _SPACES.sub("", body)
        if self.script != "keep":
            body = _converter(self.script).convert(body)
        return None if body == text.text else Change(body)


@cache
def _converter(script: str) -> Any:
    try:
        from opencc import OpenCC
    except ImportError as error:
        raise SettingError(
            f"script = \"{script}\" needs OpenCC; install it with `pip install 'ms-data[chinese]'`"
        ) from error
    return OpenCC("t2s" if script == "simplified" else "s2t")


RULE = ChineseText
