"""Comparison of schemes and methods: divergence from the float model against size."""

import math
from collections.abc import Sequence
from html import escape
from importlib import resources

import msgspec

from ms_compress.figures import figure
from ms_compress.report.chart import Point, scatter

HEADINGS = ("#", "scheme", "method", "MB", "KL", "same token", "perplexity", "s")
TEXT = (1, 2)
"""Columns with text."""


class SchemeResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scheme, rounded with one method."""

    scheme: str
    method: str
    size_bytes: int
    """Total size of the exported folder's weight files."""
    kl: float
    """KL(float || quantized) of the next token, in nats."""
    agreement: float
    """Fraction of positions with the same most likely token."""
    perplexity: float | None
    seconds: float
    """Time to quantize, without loading, measuring and export."""


class SchemeComparison(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="ms-compress-schemes-1",
):
    """All results of a comparison, in the order of the settings."""

    model: str
    """Name of the base model's folder."""
    tokens: int
    source: str
    """Source of the tokens."""
    float_size_bytes: int
    float_perplexity: float | None
    results: tuple[SchemeResult, ...]

    def best(self) -> list[int]:
        """Return the indices of results with a lower KL than every smaller result, by size."""
        by_size = sorted(
            range(len(self.results)),
            key=lambda i: (self.results[i].size_bytes, self.results[i].kl),
        )
        indices: list[int] = []
        for i in by_size:
            if not indices or self.results[i].kl < self.results[indices[-1]].kl:
                indices.append(i)
        return indices


def schemes_table(comparison: SchemeComparison) -> str:
    """Return the comparison as text; a star marks results that no smaller result beats."""
    rows = [HEADINGS, *_rows(comparison)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = [
        "  ".join(
            cell.ljust(width) if i in TEXT else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", _note(comparison)]) + "\n"


def schemes_page(comparison: SchemeComparison) -> str:
    """Return the comparison as an HTML page that works offline."""
    style = resources.files("ms_compress.report").joinpath("style.css").read_text("utf-8")
    title = f"Schemes for {escape(comparison.model)}"
    methods = list(dict.fromkeys(result.method for result in comparison.results))
    legend = "".join(
        f'<span><i class="r{i % 5}"></i>{escape(name)}</span>' for i, name in enumerate(methods)
    )
    points = [
        Point(
            x=result.size_bytes / 1e6,
            y=math.log10(max(result.kl, 1e-12)),  # no divergence at all has no logarithm
            label=str(i),
            tip=f"{result.scheme}, {result.method}: KL {figure(result.kl)}",
            group=methods.index(result.method) % 5,
        )
        for i, result in enumerate(comparison.results)
    ]
    chart = scatter(
        "Size and divergence",
        points,
        x_name="megabytes of weights",
        y_name="log10 of KL to the float model, in nats",
    )
    head = "".join(f'<th class="{_kind(i)}">{text}</th>' for i, text in enumerate(HEADINGS))
    body = "".join(
        "<tr>"
        + "".join(f'<td class="{_kind(i)}">{escape(cell)}</td>' for i, cell in enumerate(row))
        + "</tr>"
        for row in _rows(comparison)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body>\n<header><h1>{title}</h1>"
        f"<p>{escape(_note(comparison))}</p></header>\n<main>"
        f'<p class="legend">{legend}</p><div class="charts">{chart}</div>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div></main></body></html>\n"
    )


def _rows(comparison: SchemeComparison) -> Sequence[tuple[str, ...]]:
    best = comparison.best()
    return [
        (
            f"{'*' if i in best else ''}{i}",
            result.scheme,
            result.method,
            figure(result.size_bytes / 1e6, 3),
            figure(result.kl, 3),
            f"{result.agreement:.1%}",
            "" if result.perplexity is None else figure(result.perplexity, 5),
            figure(result.seconds, 2),
        )
        for i, result in enumerate(comparison.results)
    ]


def _note(comparison: SchemeComparison) -> str:
    perplexity = comparison.float_perplexity
    text = "" if perplexity is None else f", perplexity {figure(perplexity, 5)}"
    return (
        f"float: {figure(comparison.float_size_bytes / 1e6, 3)} MB{text}; KL in nats per token over"
        f" {comparison.tokens:,} tokens of {comparison.source}; * no smaller result has a lower KL"
    )


def _kind(column: int) -> str:
    return "t" if column in TEXT else "n"
