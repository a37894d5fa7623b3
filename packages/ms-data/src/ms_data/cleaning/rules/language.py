"""Keeps the documents of some languages."""

from attrs import field, frozen

from ms_data.cleaning.languages import chinese_script, detector
from ms_data.cleaning.rule import Drop, Outcome, Rule, as_tuple, library_version, texts
from ms_data.cleaning.text import Text
from ms_data.settings import flag, one_of


@frozen(kw_only=True)
class Language(Rule):
    """Tells languages by script and, where that does not, by letters (resiliparse)."""

    name = "language"

    keep: tuple[str, ...] = field(default=("en", "zh"), converter=as_tuple, validator=texts)
    """Languages of the documents to keep, as ISO 639-1 codes."""
    unknown: bool = field(default=False, validator=flag)
    """Keep documents whose language cannot be told."""
    chinese_script: str = field(default="any", validator=one_of("any", "simplified", "traditional"))
    """Keep Chinese documents of this script alone."""

    def check(self) -> None:
        """Need resiliparse."""
        detector()

    def identity(self) -> str:
        """Return the version of resiliparse."""
        return library_version("Resiliparse")

    def apply(self, text: Text, /) -> Outcome:
        """Drop the documents of other languages."""
        found = text.language
        known = found in self.keep or (found == "unknown" and self.unknown)
        if not known:
            return Drop("keep", found, " ".join(self.keep))
        if found == "zh" and self.chinese_script != "any":
            script = chinese_script(text.text)
            if script not in (self.chinese_script, "unknown"):
                return Drop("chinese_script", script, self.chinese_script)
        return None


RULE = Language
