"""Quality rules for Chinese, which has no spaces: they count characters and sentence ends."""

import re

from attrs import field, frozen

from ms_data.cleaning.ngrams import Ngrams
from ms_data.cleaning.rule import Outcome, Rule, as_tuple, over, texts, under
from ms_data.cleaning.text import SIGNS, Text, repeats
from ms_data.cleaning.words import HAN, plain_words
from ms_data.settings import integer, number

_HAN = re.compile(f"[{HAN}]")
_LETTERS = re.compile(r"[^\W\d_]+")
_SENTENCE = re.compile("[\u3002\uff01\uff1f!?\u2026\uff1b;]+")
_CLOSING = "\u201d\u2019\u300d\u300f\uff09\u3011)\"' "
_ENDS = ("\u3002", "\uff01", "\uff1f", "\u2026", "\uff1b", "\uff1a", ".", "!", "?", ";", ":")


@frozen(kw_only=True)
class ChineseQuality(Rule):
    """Measures of Gopher and FineWeb, in characters instead of words; the limits are our own."""

    name = "chinese_quality"

    languages: tuple[str, ...] = field(default=("zh",), converter=as_tuple, validator=texts)
    """Languages that the rule applies to, as ISO 639-1 codes; empty: all."""
    min_characters: int = field(default=75, validator=integer(minimum=0))
    """Minimum number of Chinese characters."""
    max_characters: int = field(default=200_000, validator=integer())
    """Maximum number of Chinese characters."""
    min_chinese: float = field(default=0.3, validator=number(maximum=1))
    """Minimum fraction of Chinese characters among all letters."""
    max_signs: float = field(default=0.35, validator=number(maximum=1))
    """Maximum fraction of punctuation and other signs among non-space characters."""
    min_ended_lines: float = field(default=0.12, validator=number(maximum=1))
    """Minimum fraction of lines that end like a sentence."""
    min_sentences: int = field(default=3, validator=integer(minimum=0))
    """Minimum number of sentence ends."""
    max_mean_sentence_characters: float = field(default=200, validator=number())
    """Maximum average number of Chinese characters per sentence end."""
    max_short_lines: float = field(default=0.67, validator=number(maximum=1))
    """Maximum fraction of short lines."""
    short_line_characters: int = field(default=10, validator=integer(minimum=0))
    """Maximum characters of a short line."""
    max_repeated_line_characters: float = field(default=0.2, validator=number(maximum=1))
    """Maximum fraction of characters in repeated lines."""
    repeated_ngram_characters: int = field(default=10, validator=integer(minimum=2, maximum=100))
    """Length of the character n-grams to check; a word of letters counts as one character."""
    max_repeated_ngrams: float = field(default=0.15, validator=number(maximum=1))
    """Maximum fraction of characters in repeated n-grams."""

    def apply(self, text: Text, /) -> Outcome:
        """Drop documents outside the limits for characters, lines and sentences."""
        body = text.text
        han = len(_HAN.findall(body))
        letters = sum(map(len, _LETTERS.findall(body)))
        dense = "".join(body.split())  # without white space
        # Counting each sign that occurs is faster than testing every character.
        signs = sum(map(dense.count, SIGNS.intersection(dense)))
        ends = len(_SENTENCE.findall(body))
        lines = [line.strip() for line in text.lines if line.strip()]
        count = max(1, len(lines))
        ended = sum(line.rstrip(_CLOSING).endswith(_ENDS) for line in lines) / count
        short = sum(len(line) <= self.short_line_characters for line in lines) / count
        repeated = repeats(lines)[1] / max(1, len(dense))
        mean_sentence = han / max(1, ends)
        return (
            under("min_characters", han, self.min_characters)
            or over("max_characters", han, self.max_characters)
            or under("min_chinese", han / max(1, letters), self.min_chinese)
            or over("max_signs", signs / max(1, len(dense)), self.max_signs)
            or under("min_ended_lines", ended, self.min_ended_lines)
            or under("min_sentences", ends, self.min_sentences)
            or over(
                "max_mean_sentence_characters", mean_sentence, self.max_mean_sentence_characters
            )
            or over("max_short_lines", short, self.max_short_lines)
            or over("max_repeated_line_characters", repeated, self.max_repeated_line_characters)
            or over(
                "max_repeated_ngrams",
                self._repeated(body) / max(1, len(dense)),
                self.max_repeated_ngrams,
            )
        )

    def _repeated(self, body: str) -> int:
        ngrams = Ngrams(plain_words(body))
        for _ in range(self.repeated_ngram_characters - 1):  # n-grams start with one word
            ngrams.grow()
        return ngrams.repeated_characters()


RULE = ChineseQuality
