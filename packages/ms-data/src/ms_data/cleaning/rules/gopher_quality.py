"""The quality rules of Gopher."""

from attrs import field, frozen

from ms_data.cleaning.rule import Drop, Outcome, Rule, as_tuple, over, texts, under
from ms_data.cleaning.text import SIGNS, Text
from ms_data.settings import number, whole

_STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


@frozen(kw_only=True)
class GopherQuality(Rule):
    """Gopher's quality rules (Rae et al. 2021, arXiv:2112.11446, A.1.1), made for English."""

    name = "gopher_quality"

    min_words: int = field(default=50, validator=whole(least=0))
    """Words, signs alone not counted, that a document has at least."""
    max_words: int = field(default=100_000, validator=whole())
    """Words that a document has at most."""
    min_mean_word_length: float = field(default=3, validator=number())
    """Characters of a word, on average, at least."""
    max_mean_word_length: float = field(default=10, validator=number())
    """Characters of a word, on average, at most."""
    max_hashes_a_word: float = field(default=0.1, validator=number())
    """Signs # for each word, at most."""
    max_ellipses_a_word: float = field(default=0.1, validator=number())
    """Ellipses for each word, at most."""
    max_bullet_lines: float = field(default=0.9, validator=number(most=1))
    """Share of lines that begin with a bullet or a dash, at most."""
    max_ellipsis_lines: float = field(default=0.3, validator=number(most=1))
    """Share of lines that end in an ellipsis, at most."""
    min_alphabetic_words: float = field(default=0.8, validator=number(most=1))
    """Share of words, signs counted, with a letter, at least."""
    min_stop_words: int = field(default=2, validator=whole(least=0))
    """How many of the stop words occur, at least."""
    stop_words: tuple[str, ...] = field(default=_STOP_WORDS, converter=as_tuple, validator=texts)
    """Words of which nearly every text has some."""

    def apply(self, text: Text, /) -> Outcome:
        """Drop what has too few or too many words, lines and signs of some kind."""
        words, characters, alphabetic = 0, 0, 0
        for word, count in text.counts.items():
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
        found = sum(word in text.counts for word in set(self.stop_words))
        return under("min_stop_words", found, self.min_stop_words)


RULE = GopherQuality
