"""C4's rules for lines and pages."""

import re
from collections import defaultdict

from attrs import field, frozen

from ms_data.cleaning.rule import Change, Cut, Drop, Outcome, Rule
from ms_data.cleaning.text import Text, count_sentences
from ms_data.settings import flag, integer

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_ENDS = (".", "?", "!", '"', "'")
_POLICIES = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)


@frozen(kw_only=True)
class C4Quality(Rule):
    """C4's rules (Raffel et al. 2020, arXiv:1910.10683, 2.2), without its list of bad words."""

    name = "c4_quality"

    remove_citations: bool = field(default=True, validator=flag)
    """Remove Wikipedia citation marks from lines."""
    ended_lines: bool = field(default=True, validator=flag)
    """Cut lines that end without punctuation or with an ellipsis."""
    min_words_a_line: int = field(default=3, validator=integer(minimum=0))
    """Cut lines with fewer words, counted between spaces."""
    max_word_characters: int = field(default=1000, validator=integer())
    """Cut lines with a longer word."""
    javascript: bool = field(default=True, validator=flag)
    """Cut lines that mention JavaScript."""
    policies: bool = field(default=True, validator=flag)
    """Cut lines about cookies, privacy and terms of use."""
    lorem_ipsum: bool = field(default=True, validator=flag)
    """Drop documents with lorem ipsum."""
    curly_brackets: bool = field(default=True, validator=flag)
    """Drop documents with a curly bracket."""
    min_sentences: int = field(default=5, validator=integer(minimum=0))
    """Minimum number of remaining sentences."""

    def apply(self, text: Text, /) -> Outcome:
        """Cut lines, and drop documents with too few remaining sentences."""
        kept_lines: list[str] = []
        cut_lines: dict[str, list[str]] = defaultdict(list)
        sentences = 0
        for original_line in text.lines:
            line = original_line.strip()
            words = line.split()
            # Checked first, as in C4, on the line before citations are removed.
            if len(line) > self.max_word_characters and any(
                len(word) > self.max_word_characters for word in words
            ):
                cut_lines["max_word_characters"].append(original_line)
                continue
            if self.remove_citations and "[" in line:
                line = _CITATION.sub("", line)
            reason = self._judge(line, len(words))
            if isinstance(reason, Drop):
                return reason
            if reason:
                cut_lines[reason].append(original_line)
                continue
            kept_lines.append(line)
            sentences += self._sentences(line, text)
        if sentences < self.min_sentences:
            return Drop("min_sentences", sentences, self.min_sentences)
        return Change("\n".join(kept_lines).strip(), tuple(_cuts(cut_lines)))

    def _judge(self, line: str, words: int) -> Drop | str:
        """Return the reason for cutting a line ("" keeps it), or a Drop of its document."""
        # In the order of C4: the first reason counts.
        if self.ended_lines and (not line.endswith(_ENDS) or line.endswith("...")):
            return "ended_lines"
        if words < self.min_words_a_line:
            return "min_words_a_line"
        lower = line.lower()
        if self.lorem_ipsum and "lorem ipsum" in lower:
            return Drop("lorem_ipsum", "lorem ipsum", "")
        if self.javascript and "javascript" in lower:
            return "javascript"
        if self.curly_brackets and "{" in line:
            return Drop("curly_brackets", "{", "")
        if self.policies and any(phrase in lower for phrase in _POLICIES):
            return "policies"
        return ""

    def _sentences(self, line: str, text: Text) -> int:
        inner = line[:-1]
        # The common case of one sentence, without splitting into words.
        if not any(end in inner for end in ".?!") and line.isascii():
            return 1
        return count_sentences(text.split(line))


def _cuts(cut: dict[str, list[str]]) -> list[Cut]:
    return [
        Cut(reason, len(lines), sum(len(line.encode()) for line in lines), lines[0])
        for reason, lines in cut.items()
    ]


RULE = C4Quality
