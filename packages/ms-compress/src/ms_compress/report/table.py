"""The report as a table of plain text."""

from ms_compress.figures import figure, ratio
from ms_compress.report.results import Report, Result

HEADINGS = (
    "#",
    "model",
    "runtime",
    "scheme",
    "perplexity",
    "MB",
    "bits a weight",
    "prefill tokens/s",
    "decode tokens/s",
    "prefill x",
    "decode x",
)
NOTE = (
    "speeds: tokens over the median time of {rounds} rounds, one row; prefill x and decode x: a"
    " model's speed over the baseline's, from the same two columns"
)
TEXTS = 4
"""So many columns hold words, or numbers that name a row."""


def table(report: Report) -> str:
    """Return the table as text; below it stands what is slower than the baseline."""
    rows = [HEADINGS, *(cells(i, one) for i, one in enumerate(report.results))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if 0 < i < TEXTS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    notes = report.warnings() or ["nothing is slower than the baseline"]
    return "\n".join([*lines, "", NOTE.format(rounds=report.rounds), *notes]) + "\n"


def cells(number: int, one: Result) -> tuple[str, ...]:
    """Return one result's row, a text for each heading."""
    return (
        str(number),
        one.model,
        one.runtime,
        one.scheme,
        figure(one.perplexity, 6),
        figure(one.size_bytes / 1e6),
        figure(one.bits_a_weight),
        figure(one.prefill_tokens_per_s),
        figure(one.decode_tokens_per_s),
        ratio(one.prefill_ratio),
        ratio(one.decode_ratio),
    )
