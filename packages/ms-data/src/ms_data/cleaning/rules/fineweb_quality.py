"""The quality rules that FineWeb added to earlier ones."""

from attrs import field, frozen

from ms_data.cleaning.rule import Drop, Outcome, Rule, over, under
from ms_data.cleaning.text import SENTENCE_ENDS, Text, repeats
from ms_data.settings import integer, number

_ENDS = tuple(sorted(SENTENCE_ENDS))


@frozen(kw_only=True)
class FineWebQuality(Rule):
    """FineWeb's quality rules (Penedo et al. 2024, arXiv:2406.17557, 3.6)."""

    name = "fineweb_quality"

    min_ended_lines: float = field(default=0.12, validator=number(maximum=1))
    """Minimum fraction of lines that end like a sentence."""
    max_short_lines: float = field(default=0.67, validator=number(maximum=1))
    """Maximum fraction of short lines."""
    short_line_characters: int = field(default=30, validator=integer(minimum=0))
    """Maximum characters of a short line."""
    max_repeated_line_characters: float = field(default=0.01, validator=number(maximum=1))
    """Maximum fraction of characters in repeated lines."""
    max_lines_a_word: float = field(default=0.3, validator=number())
    """Maximum number of line ends per word."""

    def apply(self, text: Text, /) -> Outcome:
        """Drop lists, and documents with few sentences or repeated lines."""
        lines = [line for line in text.text.split("\n") if line.strip()]
        if not lines:
            return Drop("min_ended_lines", 0.0, self.min_ended_lines)
        ended = sum(line.endswith(_ENDS) for line in lines) / len(lines)
        short = sum(len(line) <= self.short_line_characters for line in lines) / len(lines)
        ends = text.text.count("\n")
        return (
            under("min_ended_lines", ended, self.min_ended_lines)
            or over("max_short_lines", short, self.max_short_lines)
            or over(
                "max_repeated_line_characters",
                repeats(lines)[1] / (len(text.text) - ends),
                self.max_repeated_line_characters,
            )
            or over("max_lines_a_word", ends / len(text.words), self.max_lines_a_word)
        )


RULE = FineWebQuality
