"""Draws timelines as SVG; several timelines, such as simulated and measured, share one scale."""

from collections.abc import Sequence
from html import escape
from math import floor, log10
from textwrap import wrap

from attrs import frozen

from ms_parallel.arguments import check_number, check_type
from ms_parallel.errors import ScheduleError
from ms_parallel.schedules.drawing.text import check_lines, is_later_stage, number, summary
from ms_parallel.schedules.table.action import Kind
from ms_parallel.schedules.table.event_simulation import Span
from ms_parallel.schedules.timeline.simulate import Timeline

_COLORS = {
    Kind.FORWARD: ("#4c8bf5", "#a9c8fb"),
    Kind.BACKWARD: ("#2e9e5b", "#98d4af"),
    Kind.BACKWARD_INPUT: ("#17939b", "#8ccfd3"),
    Kind.BACKWARD_WEIGHT: ("#8a63c9", "#c9b4e8"),
    Kind.OVERLAP: ("#c27a1d", "#e5bd86"),
}
"""Color of a rank's first stage and of its later stages, by kind of action."""
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "full backward",
    Kind.BACKWARD_INPUT: "input backward",
    Kind.BACKWARD_WEIGHT: "weight backward",
    Kind.OVERLAP: "pair, run one after the other",
}
_BOX, _HEAD, _TITLE, _AXIS, _LEGEND = 18, 30, 18, 20, 18
_NARROW = 640
"""Width in pixels below which a rank's summary is below its row."""
_TITLE_LETTER, _LETTER = 7.6, 6.0
"""Maximum average width of a character in a title and in other text, in pixels."""
_DARK = """<style>@media (prefers-color-scheme: dark) {
rect[fill="#ffffff"] { fill: #202124 } rect[stroke="#ffffff"] { stroke: #202124 }
rect[stroke="#d93025"] { stroke: #ff8a80 } text:not([fill]) { fill: #e8eaed }
text[fill="#5f6368"] { fill: #bdc1c6 } line[stroke="#dadce0"] { stroke: #3c4043 }
line[stroke="#5f6368"] { stroke: #9aa0a6 } }</style>"""
"""Colors on a dark page; labels in boxes do not change."""
_MIN_MARK_SPACING = 56
"""Minimum distance of tick marks, in pixels."""
_MIN_LABELED_WIDTH = 14
"""Minimum width of a box with a label, in pixels."""


_MIN_WIDTH = 100
"""Minimum width of a picture, in pixels; the labels of a row take 64."""


@frozen
class _Page:
    """Layout of a picture with a given width, in pixels."""

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
    def plot_width(self) -> int:
        return self.width - self.left - self.right

    def title(self, text: str) -> list[str]:
        """Wrap a title to the width of the picture."""
        return wrap(text, max(20, int((self.width - 16) / _TITLE_LETTER)))


def draw_svg(
    *lines: Timeline, titles: Sequence[str] = (), width: int = 1200, unit: str = ""
) -> str:
    """Draw timelines below each other, on one time scale.

    Boxes are computations labeled with their microbatch, dark for a rank's first stage. The
    critical path has red edges, and idle time is empty. Each rank has its idle time and peak memory
    on the right or, in a narrow picture, below its row. The time axis and the legend are at the
    bottom. The picture has a dark mode and is never wider than its page.

    Args:
        lines: timelines to draw.
        titles: title of each timeline, such as "simulated" and "measured".
        width: width of the picture, in pixels.
        unit: unit of time, such as "ms"; by default "unit of the costs".
    """
    check_lines(lines, titles)
    check_number("width", width, minimum=_MIN_WIDTH, error=ScheduleError)
    check_type("unit", unit, str, "a string", error=ScheduleError)
    longest = max(float(line.makespan) for line in lines)
    parts, top, page = [], 0, _Page(width)
    for index, line in enumerate(lines):
        # Pixels per tick; all timelines share the scale of the longest.
        scale = page.plot_width / longest / line.ticks.per_unit if longest else 0.0
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
    """Draw the legend of the kinds that occur; return it with the y coordinate of its end."""
    kinds = {span.action.kind for line in lines for row in line.spans for span in row}
    swatches = [
        (_COLORS[action_kind], "", name)
        for action_kind, name in _NAMES.items()
        if action_kind in kinds
    ]
    has_later_stages = any(len(line.schedule.stages_of(0)) > 1 for line in lines)
    if has_later_stages:
        swatches = [(shades, shades[1], name) for shades, _, name in swatches]
    entries = [*swatches, (("#ffffff", ""), "", "critical path")]
    parts, x, y = [], 8.0, top + 4
    for (dark, _), light, name in entries:
        text = f"{name} (lighter: later stages)" if light and name == entries[0][2] else name
        entry_width = 22 + (16 if light else 0) + _LETTER * len(text) + 12
        # Start a new line.
        if x > 8 and x + entry_width > page.width - 8:
            x, y = 8.0, y + _LEGEND
        # The swatch of the critical path is an empty box with a red edge.
        edge = "#d93025" if dark == "#ffffff" else "#ffffff"
        for index, color in enumerate(filter(None, (dark, light))):
            parts.append(
                f'<rect x="{x + 16 * index:.0f}" y="{y}" width="14" height="12" fill="{color}" '
                f'stroke="{edge}" stroke-width="2"/>'
            )
        parts.append(f'<text x="{x + (36 if light else 20):.0f}" y="{y + 10}">{text}</text>')
        x += entry_width
    return parts, y + _LEGEND


def _axis(longest: float, rows: tuple[int, int], page: _Page, unit: str) -> list[str]:
    """Draw tick marks at round times up to the longest timeline's end, and name the unit."""
    begin, end = rows
    step = _round_step(longest * _MIN_MARK_SPACING / page.plot_width) if longest else 1.0
    marks = []
    # The tolerance keeps a mark at the very end.
    for index in range(int(longest / step * (1 + 1e-9)) + 1):
        x = page.left + (index * step * page.plot_width / longest if longest else 0.0)
        marks.append(
            f'<line x1="{x:.2f}" y1="{begin}" x2="{x:.2f}" y2="{end + 4}" stroke="#dadce0"/>'
            f'<text x="{x:.2f}" y="{end + 15}" text-anchor="middle" fill="#5f6368">'
            f"{index * step:g}</text>"
        )
    right = page.width - page.right
    position = f'x="{right}" y="{end + 27}" text-anchor="end"'
    if not page.narrow:
        position = f'x="{right + 8}" y="{end + 15}"'
    return [
        *marks,
        f'<line x1="{page.left}" y1="{end}" x2="{right}" y2="{end}" stroke="#5f6368"/>',
        f'<text {position} fill="#5f6368">time, {escape(unit or "unit of the costs")}</text>',
    ]


def _round_step(minimum: float) -> float:
    """Return the smallest of 1, 2, 5 and 10 times a power of ten that is at least `minimum`."""
    power = 10.0 ** floor(log10(minimum))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= minimum)


def _panel(line: Timeline, top: int, scale: float, page: _Page) -> list[str]:
    parts = []
    critical = {(rank, span.start, span.action) for rank, span in line.critical_path}
    busy, makespan = line.busy, line.makespan
    for rank, row in enumerate(line.spans):
        y = top + page.row * rank
        idle = 100 * float(1 - busy[rank] / makespan) if makespan else 0.0
        summary_text = f"idle {idle:.1f}%, peak {number(line.peak_memory[rank])}"
        x, text_y = (page.left, 29) if page.narrow else (page.width - page.right + 8, 14)
        parts.append(f'<text x="8" y="{y + 14}">rank {rank}</text>')
        parts.append(f'<text x="{x}" y="{y + text_y}">{summary_text}</text>')
        for span in row:
            is_critical = (rank, span.start, span.action) in critical
            parts.append(_box(line, rank, span, (y, page.left), scale, is_critical))
    return parts


def _box(
    line: Timeline, rank: int, span: Span, corner: tuple[int, int], scale: float, critical: bool
) -> str:
    y, plot_left = corner
    x, width = plot_left + span.start * scale, (span.end - span.start) * scale
    is_later = is_later_stage(line, rank, span)
    color, ink = _COLORS[span.action.kind][is_later], "#202124" if is_later else "#ffffff"
    edge = ' stroke="#d93025" stroke-width="2"' if critical else ' stroke="#ffffff"'
    unit = line.ticks.per_unit
    tooltip = f"{span.action}: {number(span.start / unit)} to {number(span.end / unit)}"
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BOX}" fill="{color}"{edge}>'
        f"<title>{escape(tooltip)}</title></rect>"
    )
    if width < _MIN_LABELED_WIDTH:
        return box
    label = "&amp;".join(str(part.microbatch) for part in span.action.computations)
    return box + (
        f'<text x="{x + width / 2:.2f}" y="{y + 13}" text-anchor="middle" fill="{ink}" '
        f'pointer-events="none">{label}</text>'
    )
