"""Escape control sequences in text that comes from files before a terminal shows it."""

from rich.text import Text

from ms_profile.entry import one_line


def plain(text: str) -> str:
    """Return the text as one line without control sequences."""
    return text if text.isprintable() else one_line(text)


def cell(text: str) -> Text:
    """Return `plain(text)` as a rich table cell, so that brackets are not read as styles."""
    return Text(plain(text))
