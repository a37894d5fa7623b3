"""Removes invisible characters."""

import re

from attrs import field, frozen

from ms_data.cleaning.rule import Change, Outcome, Rule
from ms_data.cleaning.text import Text
from ms_data.settings import flag

_LINE_ENDS = re.compile("\r\n?|[\x85\u2028\u2029]")  # CR LF, CR, NEL, line and paragraph separator
# ANSI escape sequences: CSI (colors), OSC up to BEL or ST (titles), and two-character ones.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_OVERSTRIKES = re.compile("[^\n]\b")  # a character and a backspace, as in man pages
# C0 without tab and line feed, DEL, C1, noncharacters, and interlinear annotations.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufff9-\ufffb\ufffe\uffff]")
_ZERO_WIDTH = re.compile("[\u00ad\u200b\u2060\ufeff]")  # soft hyphen, space, word joiner, BOM
# Everything above in one pattern, as most documents contain none of it.
_ALL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u200b\u2028\u2029\u2060\ufdd0-\ufdef\ufeff"
    "\ufff9-\ufffb\ufffe\uffff]"
)


@frozen(kw_only=True)
class ControlCharacters(Rule):
    """Removes control characters (Unicode category Cc), except tabs and line ends."""

    name = "control_characters"

    line_ends: bool = field(default=True, validator=flag)
    """Convert all line ends to line feeds."""
    escapes: bool = field(default=True, validator=flag)
    """Remove terminal colors, and letters that were typed twice for bold."""
    zero_width: bool = field(default=True, validator=flag)
    """Remove zero-width spaces, soft hyphens and byte order marks; joiners are kept."""

    def apply(self, text: Text, /) -> Outcome:
        """Return the text without such characters."""
        body = text.text
        if not _ALL.search(body):
            return None
        if self.line_ends:
            body = _LINE_ENDS.sub("\n", body)
        if self.escapes:
            body = _OVERSTRIKES.sub("", _ESCAPES.sub("", body))
        body = _CONTROLS.sub("", body) if self.line_ends else _keep_line_ends(body)
        if self.zero_width:
            body = _ZERO_WIDTH.sub("", body)
        return None if body == text.text else Change(body)


def _keep_line_ends(body: str) -> str:
    return _CONTROLS.sub(lambda match: match[0] if match[0] in "\r\x85" else "", body)


RULE = ControlCharacters
