"""HTML page of a report: tiles, notes, charts and a table in one file that works offline."""

from html import escape
from importlib import resources

from ms_compress.figures import figure, ratio
from ms_compress.report.chart import Bar, Point, bars, scatter
from ms_compress.report.results import Report, Result
from ms_compress.report.table import HEADINGS, TEXT_COLUMNS, cells

COLORS = 5  # classes r0 to r4 in style.css


def render(report: Report) -> str:
    """Return the page as HTML."""
    style = resources.files("ms_compress.report").joinpath("style.css").read_text("utf-8")
    title = escape(report.title)
    notes = "".join(f'<p class="warning">{escape(line)}</p>' for line in report.warnings())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body>\n<header><h1>{title}</h1>{_subtitle(report)}</header>"
        f"\n<main>{_tiles(report)}{notes}{_legend(report)}"
        f'<div class="charts">{_charts(report)}</div>{_table(report)}</main></body></html>\n'
    )


def _subtitle(report: Report) -> str:
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    return (
        f"<p>Perplexity over {report.held_out_tokens:,} held-out tokens in sequences of"
        f" {report.sequence_length}, computed by each runtime. Speeds: one row,"
        f" {report.prefill_tokens} tokens of prefill, then {report.decode_tokens} decoded tokens;"
        f" tokens divided by the median time of {report.rounds} alternating rounds on {threads}."
        f" Ratios are relative to {escape(report.baseline.model)} in"
        f" {escape(report.baseline.runtime)}.</p>"
    )


def _tiles(report: Report) -> str:
    base, compressed = report.baseline, report.results[1:]
    tiles = [(figure(base.perplexity), f"perplexity of {base.model}")]
    if compressed:
        best = min(compressed, key=lambda result: result.perplexity)
        small = min(compressed, key=lambda result: result.size_bytes)
        fast = max(compressed, key=lambda result: result.decode_ratio)
        tiles += [
            (figure(best.perplexity), f"best compressed perplexity: {best.model}"),
            (
                f"{figure(base.size_bytes / small.size_bytes, 2)}x",
                f"highest reduction in size: {small.model}",
            ),
            (
                f"{ratio(fast.decode_ratio)}x",
                f"highest decode speed, relative to the baseline: {fast.model} in {fast.runtime}",
            ),
        ]
    inner = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(caption)}</span></div>'
        for value, caption in tiles
    )
    return f'<div class="tiles">{inner}</div>'


def _runtimes(report: Report) -> list[str]:
    """Return the runtimes in order of first appearance."""
    return list(dict.fromkeys(result.runtime for result in report.results))


def _legend(report: Report) -> str:
    inner = "".join(
        f'<span><i class="r{i % COLORS}"></i>{escape(name)}</span>'
        for i, name in enumerate(_runtimes(report))
    )
    return f'<p class="legend">{inner}</p>'


def _charts(report: Report) -> str:
    groups = {name: i % COLORS for i, name in enumerate(_runtimes(report))}
    base = report.baseline

    def chart(title: str, field: str, digits: int, reference: float) -> str:
        rows = [
            Bar(
                label=f"{i}  {name}",
                value=getattr(result, field),
                text=figure(getattr(result, field), digits),
                group=groups[result.runtime],
            )
            for i, (result, name) in enumerate(zip(report.results, report.names(), strict=True))
        ]
        return bars(title, rows, reference=reference)

    points = [
        Point(
            x=result.size_bytes / 1e6,
            y=result.perplexity,
            label=str(i),
            tip=f"{name}: {figure(result.perplexity, 6)}",
            group=groups[result.runtime],
        )
        for i, (result, name) in enumerate(zip(report.results, report.names(), strict=True))
    ]
    return (
        scatter("Perplexity and size", points, x_name="megabytes on disk", y_name="perplexity")
        + chart("Perplexity, lower is better", "perplexity", 6, base.perplexity)
        + chart("Decode, tokens/s", "decode_tokens_per_s", 4, base.decode_tokens_per_s)
        + chart("Prefill, tokens/s", "prefill_tokens_per_s", 4, base.prefill_tokens_per_s)
        + chart("Bits per weight", "bits_a_weight", 4, base.bits_a_weight)
    )


def _table(report: Report) -> str:
    head = "".join(f'<th class="{_kind(i)}">{escape(text)}</th>' for i, text in enumerate(HEADINGS))
    rows = "".join(_row(i, result) for i, result in enumerate(report.results))
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
    )


def _row(number: int, result: Result) -> str:
    slow = {f"{name} x" for name in result.slower} if number else set()
    return (
        "<tr>"
        + "".join(
            f'<td class="{_kind(i)}{" slow" if heading in slow else ""}">{escape(text)}</td>'
            for i, (heading, text) in enumerate(zip(HEADINGS, cells(number, result), strict=True))
        )
        + "</tr>"
    )


def _kind(column: int) -> str:
    return "t" if 0 < column < TEXT_COLUMNS else "n"
