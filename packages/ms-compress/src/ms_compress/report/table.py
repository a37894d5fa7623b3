"""Render a report as a text table."""

from ms_compress.figures import figure, ratio
from ms_compress.report.results import Report, Result

HEADINGS = (
    "#",
    "model",
    "runtime",
    "scheme",
    "perplexity",
    "MB",
    "bits per weight",
    "prefill tokens/s",
    "decode tokens/s",
    "prefill x",
    "decode x",
)
NOTE = (
    "speeds: tokens divided by the median time of {rounds} rounds, one row; prefill x and decode x:"
    " the model's speed divided by the baseline's"
)
TEXT_COLUMNS = 4
"""Number of leading columns with text, or with numbers that identify a row."""


def table(report: Report) -> str:
    """Return the table as text, followed by a note for each result slower than the baseline."""
    rows = [HEADINGS, *(cells(i, result) for i, result in enumerate(report.results))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if 0 < i < TEXT_COLUMNS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    notes = report.warnings() or ["nothing is slower than the baseline"]
    return "\n".join([*lines, "", NOTE.format(rounds=report.rounds), *notes]) + "\n"


def cells(number: int, result: Result) -> tuple[str, ...]:
    """Return the row of a result, one text per heading."""
    return (
        str(number),
        result.model,
        result.runtime,
        result.scheme,
        figure(result.perplexity, 6),
        figure(result.size_bytes / 1e6),
        figure(result.bits_a_weight),
        figure(result.prefill_tokens_per_s),
        figure(result.decode_tokens_per_s),
        ratio(result.prefill_ratio),
        ratio(result.decode_ratio),
    )
