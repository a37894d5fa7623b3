"""mC4's rule for pages without paragraphs."""

from attrs import field, frozen

from ms_data.cleaning.rule import Outcome, Rule, under
from ms_data.cleaning.text import Text
from ms_data.settings import integer


@frozen(kw_only=True)
class C4Paragraphs(Rule):
    """mC4's rule of three long lines (Xue et al. 2021, arXiv:2010.11934, 3.1)."""

    name = "c4_paragraphs"

    min_long_lines: int = field(default=3, validator=integer(minimum=0))
    """Minimum number of long lines."""
    long_line_characters: int = field(default=200, validator=integer(minimum=0))
    """Minimum characters of a long line."""

    def apply(self, text: Text, /) -> Outcome:
        """Drop documents with few long lines."""
        lines = text.text.split("\n")
        long = sum(len(line) >= self.long_line_characters for line in lines)
        return under("min_long_lines", long, self.min_long_lines)


RULE = C4Paragraphs
