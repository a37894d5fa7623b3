"""Numbers as text with a fixed count of significant digits, for tables, charts and progress."""

import math


def figure(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, never rounding a small one to zero.

    Plain decimals with thousands separators from 1e-4 to 1e9, scientific notation beyond.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if not -4 <= exponent < 9:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def ratio(value: float) -> str:
    """Format a quotient of speeds with two decimals, small ones with two significant digits."""
    return f"{value:.2f}" if value >= 0.1 else figure(value, 2)
