"""Parsing of integers in foreign output."""

MAX_DIGITS = 20


def parse_int(text: str | None) -> int | None:
    """Parse a nonnegative integer; None if the text is not one, or is implausibly long."""
    text = (text or "").strip()
    fits = text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS
    return int(text) if fits else None
