"""Draws timelines as SVG; a simulated and a measured one share one scale of time."""

from collections.abc import Sequence
from html import escape
from math import floor, log10
from textwrap import wrap

from attrs import frozen

from ms_parallel.schedules.drawing.text import is_later_stage, number, summary
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.playback import Span
from ms_parallel.schedules.timeline.simulate import Timeline

_COLOURS = {
    Kind.FORWARD: ("#4c8bf5", "#a9c8fb"),
    Kind.BACKWARD: ("#2e9e5b", "#98d4af"),
    Kind.BACKWARD_INPUT: ("#17939b", "#8ccfd3"),
    Kind.BACKWARD_WEIGHT: ("#8a63c9", "#c9b4e8"),
    Kind.OVERLAP: ("#c27a1d", "#e5bd86"),
}
"""For each kind the colour of a rank's first stage and of its later ones."""
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "full backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.OVERLAP: "pair, one after the other",
}
_BOX, _HEAD, _TITLE, _AXIS, _LEGEND = 18, 30, 18, 20, 18
_NARROW = 640
"""Width below which a rank's facts stand under its row, in pixels."""
_TITLE_LETTER, _LETTER = 7.6, 6.0
"""Pixels that a letter of a title, and of the rest, takes at most on average."""
_DARK = """<style>@media (prefers-color-scheme: dark) {
rect[fill="#ffffff"] { fill: #202124 } rect[stroke="#ffffff"] { stroke: #202124 }
rect[stroke="#d93025"] { stroke: #ff8a80 } text:not([fill]) { fill: #e8eaed }
text[fill="#5f6368"] { fill: #bdc1c6 } line[stroke="#dadce0"] { stroke: #3c4043 }
line[stroke="#5f6368"] { stroke: #9aa0a6 } }</style>"""
"""The same picture on a dark page; what is written in boxes stays as it is."""
_CLOSEST_MARKS = 56
"""Pixels between two marks of the axis, at the least."""
_NARROWEST_LABEL = 14
"""Pixels below which a box bears no number."""


@frozen
class _Page:
    """How a picture of some width is laid out, in pixels."""

    width: int

    @property
    def narrow(self) -> bool:
        return self.width < _NARROW

    @property
    def left(self) -> int:
        return 52 if self.narrow else 60

    @property
    def right(self) -> int:
        return 12 if self.narrow else 150

    @property
    def row(self) -> int:
        return _BOX + (16 if self.narrow else 4)

    @property
    def room(self) -> int:
        return self.width - self.left - self.right

    def title(self, text: str) -> list[str]:
        """Wrap a title into lines that fit."""
        return wrap(text, max(20, int((self.width - 16) / _TITLE_LETTER)))


def draw_svg(
    *lines: Timeline, titles: Sequence[str] = (), width: int = 1200, unit: str = ""
) -> str:
    """Draw one or more timelines under one another, on one scale of time.

    Boxes are computations with their microbatch, dark for a rank's first stage; the critical path
    has a red edge; idle time is empty. The axis of time is below; each rank's idle share and peak
    memory are at the right, or in a narrow picture below its row; the legend is last. The picture
    is dark on a dark page, and never wider than its page.

    Args:
        lines: What to draw.
        titles: What each one is, such as "simulated" and "measured".
        width: Of the picture, in pixels.
        unit: Of time, such as "ms"; by default whatever the costs are in.
    """
    longest = max(float(line.makespan) for line in lines)
    parts, top, page = [], 0, _Page(width)
    for index, line in enumerate(lines):
        scale = page.room / longest / line.ticks.per_unit if longest else 0.0
        words = page.title(summary(line, titles, index))
        begin = top + _HEAD + _TITLE * (len(words) - 1)
        bottom = begin + page.row * line.schedule.ranks
        parts += [
            f'<text x="8" y="{top + 18 + _TITLE * number}" font-size="14">{escape(text)}</text>'
            for number, text in enumerate(words)
        ]
        parts += _axis(longest, (begin, bottom), page, unit)
        parts += _panel(line, begin, scale, page)
        top = bottom + 14 + _AXIS
    legend, top = _legend(lines, top, page)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 8}" '
        f'viewBox="0 0 {width} {top + 8}" font-family="sans-serif" font-size="11" '
        f'style="max-width:100%;height:auto">\n{_DARK}\n'
        f'<rect width="{width}" height="{top + 8}" fill="#ffffff"/>\n'
        + "\n".join([*parts, *legend])
        + "\n</svg>\n"
    )


def _legend(lines: Sequence[Timeline], top: int, page: _Page) -> tuple[list[str], int]:
    """Draw what the colours mean, of the kinds that are drawn; return also where it ends."""
    there = {span.action.kind for line in lines for row in line.spans for span in row}
    swatches = [(_COLOURS[kind], "", name) for kind, name in _NAMES.items() if kind in there]
    later = any(len(line.schedule.stages_of(0)) > 1 for line in lines)
    if later:
        swatches = [(both, both[1], name) for both, _, name in swatches]
    entries = [*swatches, (("#ffffff", ""), "", "critical path")]
    parts, x, y = [], 8.0, top + 4
    for (dark, _), light, name in entries:
        text = f"{name} (lighter: later stages)" if light and name == entries[0][2] else name
        wide = 22 + (16 if light else 0) + _LETTER * len(text) + 12
        if x > 8 and x + wide > page.width - 8:
            x, y = 8.0, y + _LEGEND
        edge = "#d93025" if dark == "#ffffff" else "#ffffff"
        for place, colour in enumerate(filter(None, (dark, light))):
            parts.append(
                f'<rect x="{x + 16 * place:.0f}" y="{y}" width="14" height="12" fill="{colour}" '
                f'stroke="{edge}" stroke-width="2"/>'
            )
        parts.append(f'<text x="{x + (36 if light else 20):.0f}" y="{y + 10}">{text}</text>')
        x += wide
    return parts, y + _LEGEND


def _axis(longest: float, rows: tuple[int, int], page: _Page, unit: str) -> list[str]:
    """Draw marks from 0 to the longest timeline's end, at round times, and what they are in."""
    begin, end = rows
    step = _round_step(longest * _CLOSEST_MARKS / page.room) if longest else 1.0
    marks = []
    for index in range(int(longest / step * (1 + 1e-9)) + 1):
        x = page.left + (index * step * page.room / longest if longest else 0.0)
        marks.append(
            f'<line x1="{x:.2f}" y1="{begin}" x2="{x:.2f}" y2="{end + 4}" stroke="#dadce0"/>'
            f'<text x="{x:.2f}" y="{end + 15}" text-anchor="middle" fill="#5f6368">'
            f"{index * step:g}</text>"
        )
    right = page.width - page.right
    where = f'x="{right}" y="{end + 27}" text-anchor="end"'
    if not page.narrow:
        where = f'x="{right + 8}" y="{end + 15}"'
    return [
        *marks,
        f'<line x1="{page.left}" y1="{end}" x2="{right}" y2="{end}" stroke="#5f6368"/>',
        f'<text {where} fill="#5f6368">time, {escape(unit or "unit of the costs")}</text>',
    ]


def _round_step(least: float) -> float:
    """Find the least of 1, 2, 5, 10, ... times a power of ten that is not below `least`."""
    power = 10.0 ** floor(log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)


def _panel(line: Timeline, top: int, scale: float, page: _Page) -> list[str]:
    parts = []
    critical = {(rank, span.start, span.action) for rank, span in line.critical_path}
    busy, makespan = line.busy, line.makespan
    for rank, row in enumerate(line.spans):
        y = top + page.row * rank
        idle = 100 * float(1 - busy[rank] / makespan) if makespan else 0.0
        facts = f"idle {idle:.1f}%, peak {number(line.peak_memory[rank])}"
        x, below = (page.left, 29) if page.narrow else (page.width - page.right + 8, 14)
        parts.append(f'<text x="8" y="{y + 14}">rank {rank}</text>')
        parts.append(f'<text x="{x}" y="{y + below}">{facts}</text>')
        for span in row:
            edged = (rank, span.start, span.action) in critical
            parts.append(_box(line, rank, span, (y, page.left), scale, edged))
    return parts


def _box(
    line: Timeline, rank: int, span: Span, corner: tuple[int, int], scale: float, critical: bool
) -> str:
    y, left = corner
    x, wide = left + span.start * scale, (span.end - span.start) * scale
    later = is_later_stage(line, rank, span)
    colour, ink = _COLOURS[span.action.kind][later], "#202124" if later else "#ffffff"
    edge = ' stroke="#d93025" stroke-width="2"' if critical else ' stroke="#ffffff"'
    unit = line.ticks.per_unit
    tip = f"{span.action}: {number(span.start / unit)} to {number(span.end / unit)}"
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_BOX}" fill="{colour}"{edge}>'
        f"<title>{escape(tip)}</title></rect>"
    )
    if wide < _NARROWEST_LABEL:
        return box
    label = "&amp;".join(str(part.microbatch) for part in span.action.computations)
    return box + (
        f'<text x="{x + wide / 2:.2f}" y="{y + 13}" text-anchor="middle" fill="{ink}" '
        f'pointer-events="none">{label}</text>'
    )
