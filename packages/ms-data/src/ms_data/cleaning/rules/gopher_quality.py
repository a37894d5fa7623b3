"""Gopher's quality rules."""

from attrs import field, frozen

from ms_data.cleaning.rule import Drop, Outcome, Rule, as_tuple, over, texts, under
from ms_data.cleaning.text import SIGNS, Text
from ms_data.settings import integer, number

_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


@frozen(kw_only=True)
class GopherQuality(Rule):
    """Gopher's quality rules (Rae et al. 2021, arXiv:2112.11446, A.1.1), designed for English."""

    name = "gopher_quality"

    min_words: int = field(default=50, validator=integer(minimum=0))
    """Minimum number of words, not counting punctuation."""
    max_words: int = field(default=100_000, validator=integer())
    """Maximum number of words."""
    min_mean_word_length: float = field(default=3, validator=number())
    """Minimum average word length in characters."""
    max_mean_word_length: float = field(default=10, validator=number())
    """Maximum average word length in characters."""
    max_hashes_a_word: float = field(default=0.1, validator=number())
    """Maximum number of # signs per word."""
    max_ellipses_a_word: float = field(default=0.1, validator=number())
    """Maximum number of ellipses per word."""
    max_bullet_lines: float = field(default=0.9, validator=number(maximum=1))
    """Maximum fraction of lines that start with a bullet or a dash."""
    max_ellipsis_lines: float = field(default=0.3, validator=number(maximum=1))
    """Maximum fraction of lines that end with an ellipsis."""
    min_alphabetic_words: float = field(default=0.8, validator=number(maximum=1))
    """Minimum fraction of words, including signs, that contain a letter."""
    min_stop_words: int = field(default=2, validator=integer(minimum=0))
    """Minimum number of different stop words."""
    stop_words: tuple[str, ...] = field(default=_STOP_WORDS, converter=as_tuple, validator=texts)
    """Very common words, several of which occur in nearly every text."""

    def apply(self, text: Text, /) -> Outcome:
        """Drop documents outside the limits for words, lines and signs."""
        words, characters, alphabetic = 0, 0, 0
        for word, count in text.counts.items():
            # Count each distinct word once, weighted by its frequency.
            if word.isalpha():
                words += count
                characters += count * len(word)
                alphabetic += count
                continue
            if not SIGNS.issuperset(word):
                words += count
                characters += count * len(word)
            if any(map(str.isalpha, word)):
                alphabetic += count
        total = max(1, len(text.words))
        mean = characters / words if words else 0.0
        body = text.text
        ellipses = body.count("...") + body.count("\u2026")
        return (
            under("min_words", words, self.min_words)
            or over("max_words", words, self.max_words)
            or under("min_mean_word_length", mean, self.min_mean_word_length)
            or over("max_mean_word_length", mean, self.max_mean_word_length)
            or over("max_hashes_a_word", body.count("#") / total, self.max_hashes_a_word)
            or over("max_ellipses_a_word", ellipses / total, self.max_ellipses_a_word)
            or self._lines(text.lines)
            or under("min_alphabetic_words", alphabetic / total, self.min_alphabetic_words)
            or self._stop_words(text)
        )

    def _lines(self, lines: list[str]) -> Drop | None:
        bullets = sum(line.lstrip().startswith(("\u2022", "-")) for line in lines)
        ellipses = sum(line.rstrip().endswith(("...", "\u2026")) for line in lines)
        return over("max_bullet_lines", bullets / len(lines), self.max_bullet_lines) or over(
            "max_ellipsis_lines", ellipses / len(lines), self.max_ellipsis_lines
        )

    def _stop_words(self, text: Text) -> Drop | None:
        count = sum(word in text.counts for word in set(self.stop_words))
        return under("min_stop_words", count, self.min_stop_words)


RULE = GopherQuality
