"""Text from files as a terminal may show it: control sequences are spelled out, not obeyed."""

from rich.text import Text

from ms_profile.entry import one_line


def plain(text: str) -> str:
    """Return the text in one line that a terminal prints as it is."""
    return text if text.isprintable() else one_line(text)


def cell(text: str) -> Text:
    """Return the same for a table of rich's, which takes brackets for styles."""
    return Text(plain(text))
