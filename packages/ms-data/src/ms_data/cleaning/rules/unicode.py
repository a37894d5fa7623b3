"""Repairs wrongly decoded text, and normalizes Unicode."""

import unicodedata
from typing import Any, Literal, cast

from attrs import field, frozen

from ms_data.cleaning.rule import Change, Outcome, Rule, library_version
from ms_data.cleaning.text import Text
from ms_data.errors import SettingError
from ms_data.settings import flag, one_of


@frozen(kw_only=True)
class Unicode(Rule):
    """Repairs wrongly decoded text with ftfy (Speer 2019), and normalizes (Unicode annex 15)."""

    name = "unicode"

    repair: bool = field(default=True, validator=flag)
    """Undo wrong decodings, such as Ã© for é. Line ends, quotes and widths are not changed."""
    form: str = field(default="NFC", validator=one_of("NFC", "NFKC", "none"))
    """Normalization form: NFC, NFKC or none."""

    def check(self) -> None:
        """Check that ftfy is installed."""
        super().check()
        if self.repair:
            _ftfy()

    def identity(self) -> str:
        """Return the versions of ftfy and of Python's Unicode database."""
        ftfy_version = library_version("ftfy") if self.repair else ""
        return f"{super().identity()} {ftfy_version} Unicode {unicodedata.unidata_version}".strip()

    def apply(self, text: Text, /) -> Outcome:
        """Return the repaired and normalized text."""
        body = text.text
        if body.isascii():  # neither damaged nor denormalized
            return None
        if self.repair:
            ftfy = _ftfy()
            body = ftfy.fix_text(body, _config(ftfy))
        if self.form != "none":
            body = unicodedata.normalize(cast(Literal["NFC", "NFKC"], self.form), body)
        return None if body == text.text else Change(body)


def _ftfy() -> Any:
    try:
        import ftfy
    except ImportError as error:
        raise SettingError(
            "the rule unicode needs ftfy; install it with `pip install 'ms-data[clean]'`, or set "
            "repair = false"
        ) from error
    return ftfy


def _config(ftfy: Any) -> Any:
    # Only wrong decodings are repaired: the other fixes would change correct text.
    return ftfy.TextFixerConfig(
        unescape_html=False,
        remove_terminal_escapes=False,
        fix_latin_ligatures=False,
        fix_character_width=False,
        uncurl_quotes=False,
        fix_line_breaks=False,
        remove_control_chars=False,
        normalization=None,
        explain=False,
    )


RULE = Unicode
