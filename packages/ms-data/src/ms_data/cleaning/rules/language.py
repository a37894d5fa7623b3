"""Keeps documents in the given languages."""

from attrs import field, frozen

from ms_data.cleaning.languages import chinese_script, language_detector
from ms_data.cleaning.rule import Drop, Outcome, Rule, as_tuple, library_version, texts
from ms_data.cleaning.text import Text
from ms_data.settings import flag, one_of


@frozen(kw_only=True)
class Language(Rule):
    """Detects languages by script and, if that is not conclusive, by letters (resiliparse)."""

    name = "language"

    keep: tuple[str, ...] = field(default=("en", "zh"), converter=as_tuple, validator=texts)
    """Languages of the documents to keep, as ISO 639-1 codes."""
    unknown: bool = field(default=False, validator=flag)
    """Keep documents of unknown language."""
    chinese_script: str = field(default="any", validator=one_of("any", "simplified", "traditional"))
    """Keep only Chinese documents in this script."""

    def check(self) -> None:
        """Check that resiliparse is installed."""
        language_detector()

    def identity(self) -> str:
        """Return the version of resiliparse."""
        return library_version("Resiliparse")

    def apply(self, text: Text, /) -> Outcome:
        """Drop documents in other languages."""
        code = text.language
        wanted_language = code in self.keep or (code == "unknown" and self.unknown)
        if not wanted_language:
            return Drop("keep", code, " ".join(self.keep))
        if code == "zh" and self.chinese_script != "any":
            script = chinese_script(text.text)
            if script not in (self.chinese_script, "unknown"):
                return Drop("chinese_script", script, self.chinese_script)
        return None


RULE = Language
