"""Format numbers with a fixed number of significant digits for tables, charts and progress."""

import math


def figure(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits; small numbers are never rounded to zero.

    Uses decimals with thousands separators from 1e-4 to 1e9, and scientific notation otherwise.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if not -4 <= exponent < 9:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def ratio(value: float) -> str:
    """Format a ratio of speeds with two decimals, or two significant digits if below 0.1."""
    return f"{value:.2f}" if value >= 0.1 else figure(value, 2)
