"""Gopher's repetition rules."""

import re

from attrs import field, frozen

from ms_data.cleaning.ngrams import Ngrams
from ms_data.cleaning.rule import Drop, Outcome, Rule, as_tuple, fractions, over
from ms_data.cleaning.text import Text, repeats
from ms_data.settings import number

_PARAGRAPHS = re.compile(r"\n{2,}")
_LINES = re.compile(r"\n+")
# Table A1, n = 2 to 4, 5 to 10.
_TOP, _REPEATED = (0.20, 0.18, 0.16), (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)


@frozen(kw_only=True)
class GopherRepetition(Rule):
    """Gopher's repetition rules (Rae et al. 2021, arXiv:2112.11446, table A1)."""

    name = "gopher_repetition"

    max_repeated_paragraphs: float = field(default=0.3, validator=number(maximum=1))
    """Maximum fraction of repeated paragraphs."""
    max_repeated_paragraph_characters: float = field(default=0.2, validator=number(maximum=1))
    """Maximum fraction of characters in repeated paragraphs."""
    max_repeated_lines: float = field(default=0.3, validator=number(maximum=1))
    """Maximum fraction of repeated lines."""
    max_repeated_line_characters: float = field(default=0.2, validator=number(maximum=1))
    """Maximum fraction of characters in repeated lines."""
    max_top_ngrams: tuple[float, ...] = field(
        default=_TOP, converter=as_tuple, validator=fractions(count=3)
    )
    """Maximum fraction of characters in the most frequent word n-gram, for n = 2 to 4."""
    max_repeated_ngrams: tuple[float, ...] = field(
        default=_REPEATED, converter=as_tuple, validator=fractions(count=6)
    )
    """Maximum fraction of characters in repeated word n-grams, for n = 5 to 10."""

    def apply(self, text: Text, /) -> Outcome:
        """Drop documents with repeated paragraphs, lines or words."""
        body = text.text
        return (
            self._parts("paragraph", _PARAGRAPHS.split(body.strip()), len(body))
            or self._parts("line", _LINES.split(body), len(body))
            or self.repeated_words(text.words, len(body))
        )

    def _parts(self, unit: str, parts: list[str], size: int) -> Drop | None:
        count, characters = repeats(parts)
        count_setting, size_setting = f"max_repeated_{unit}s", f"max_repeated_{unit}_characters"
        return over(count_setting, count / len(parts), getattr(self, count_setting)) or over(
            size_setting, characters / size, getattr(self, size_setting)
        )

    def repeated_words(self, words: list[str], size: int) -> Drop | None:
        """Drop a document with repeated words; `size` is the length of the text."""
        ngrams = Ngrams(words)
        for limit in self.max_top_ngrams:
            ngrams.grow()  # from n = 1, by one word at a time
            share = ngrams.top_characters() / size
            if share > limit:
                return Drop("max_top_ngrams", round(share, 6), limit)
        for limit in self.max_repeated_ngrams:
            ngrams.grow()
            share = ngrams.repeated_characters() / size
            if share > limit:
                return Drop("max_repeated_ngrams", round(share, 6), limit)
        return None


RULE = GopherRepetition
