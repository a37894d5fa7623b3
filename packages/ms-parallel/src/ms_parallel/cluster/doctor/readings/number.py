"""Whole numbers in what others print, none of which is longer than a count of bytes."""

MOST_DIGITS = 20


def whole(text: str | None) -> int | None:
    """Read a text as a number; None where it is none, or longer than any that is meant."""
    text = (text or "").strip()
    fits = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
    return int(text) if fits else None
