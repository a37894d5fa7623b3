"""Pictures of timelines: SVG, a page of HTML, and lines for a terminal.

Two timelines of one schedule, the simulated and the measured, are drawn on one scale of time.
"""

from collections.abc import Sequence
from html import escape
from math import floor, log10

from ms_parallel.schedules.action import Kind
from ms_parallel.schedules.simulate import Span, Timeline

__all__ = ["draw_html", "draw_svg", "draw_text", "path_text"]

_COLOURS = {
    Kind.FORWARD: ("#4c8bf5", "#a9c8fb"),
    Kind.BACKWARD: ("#2e9e5b", "#98d4af"),
    Kind.BACKWARD_INPUT: ("#17939b", "#8ccfd3"),
    Kind.BACKWARD_WEIGHT: ("#8a63c9", "#c9b4e8"),
    Kind.OVERLAP: ("#c27a1d", "#e5bd86"),
}
"""For each kind the colour of a rank's first stage and of its later ones."""
_ANSI = {
    Kind.FORWARD: 34,
    Kind.BACKWARD: 32,
    Kind.BACKWARD_INPUT: 36,
    Kind.BACKWARD_WEIGHT: 35,
    Kind.OVERLAP: 33,
}
_LETTERS = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
    Kind.OVERLAP: "O",
}
_ROW, _LEFT, _RIGHT, _HEAD, _AXIS = 22, 60, 150, 44, 20
_CLOSEST_MARKS = 56
"""Pixels between two marks of the axis, at the least."""
_NARROWEST_LABEL = 14
"""Pixels below which a box bears no number."""


def _number(value: object) -> str:
    return f"{float(value):.4g}"  # type: ignore[arg-type]


def _summary(line: Timeline, title: str) -> str:
    name = line.schedule.name or "schedule"
    return (
        f"{title + ': ' if title else ''}{name}, {line.schedule.ranks} ranks, "
        f"{line.schedule.stages} stages, {line.schedule.microbatches} microbatches: makespan "
        f"{_number(line.makespan)}, bubble {100 * float(line.bubble):.2f}%"
    )


def _is_later_stage(line: Timeline, rank: int, span: Span) -> bool:
    return span.action.computations[0].stage != line.schedule.stages_of(rank)[0]


def draw_svg(
    *lines: Timeline, titles: Sequence[str] = (), width: int = 1200, unit: str = ""
) -> str:
    """A picture of one or more timelines under one another, on one scale of time.

    Boxes are computations with their microbatch, dark for a rank's first stage; the critical path
    has a red edge; idle time is empty. Under them runs the time; at the right stand each rank's
    idle share and peak memory.

    Args:
        lines: What to draw.
        titles: What each one is, such as "simulated" and "measured".
        width: Of the picture, in pixels.
        unit: Of time, such as "ms"; by default whatever the costs are in.
    """
    longest = max(float(line.makespan) for line in lines)
    parts, top = [], 0
    for index, line in enumerate(lines):
        title = titles[index] if index < len(titles) else ""
        scale = (width - _LEFT - _RIGHT) / longest / line.ticks.per_unit if longest else 0.0
        bottom = top + _HEAD - 14 + _ROW * line.schedule.ranks
        parts += _axis(longest, (top + _HEAD - 14, bottom), width, unit)
        parts += _panel(line, title, top, scale, width)
        top = bottom + 14 + _AXIS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 8}" '
        f'viewBox="0 0 {width} {top + 8}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{top + 8}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _axis(longest: float, rows: tuple[int, int], width: int, unit: str) -> list[str]:
    """Marks from 0 to the longest timeline's end, at round times, and what they are in."""
    begin, end = rows
    room = width - _LEFT - _RIGHT
    step = _round_step(longest * _CLOSEST_MARKS / room) if longest else 1.0
    marks = []
    for index in range(int(longest / step * (1 + 1e-9)) + 1):
        x = _LEFT + (index * step * room / longest if longest else 0.0)
        marks.append(
            f'<line x1="{x:.2f}" y1="{begin}" x2="{x:.2f}" y2="{end + 4}" stroke="#dadce0"/>'
            f'<text x="{x:.2f}" y="{end + 15}" text-anchor="middle" fill="#5f6368">'
            f"{index * step:g}</text>"
        )
    return [
        *marks,
        f'<line x1="{_LEFT}" y1="{end}" x2="{width - _RIGHT}" y2="{end}" stroke="#5f6368"/>',
        f'<text x="{width - _RIGHT + 8}" y="{end + 15}" fill="#5f6368">'
        f"time, {escape(unit or 'unit of the costs')}</text>",
    ]


def _round_step(least: float) -> float:
    """The least of 1, 2, 5, 10, ... times a power of ten that is not below `least`."""
    power = 10.0 ** floor(log10(least))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least)


def _panel(line: Timeline, title: str, top: int, scale: float, width: int) -> list[str]:
    parts = [f'<text x="8" y="{top + 18}" font-size="14">{escape(_summary(line, title))}</text>']
    critical = {(rank, span.start, span.action) for rank, span in line.critical_path}
    busy, makespan = line.busy, line.makespan
    for rank, row in enumerate(line.spans):
        y = top + _HEAD - 14 + _ROW * rank
        idle = 100 * float(1 - busy[rank] / makespan) if makespan else 0.0
        parts.append(f'<text x="8" y="{y + 14}">rank {rank}</text>')
        parts.append(
            f'<text x="{width - _RIGHT + 8}" y="{y + 14}">idle {idle:.1f}%, peak '
            f"{_number(line.peak_memory[rank])}</text>"
        )
        parts += [
            _box(line, rank, span, y, scale, (rank, span.start, span.action) in critical)
            for span in row
        ]
    return parts


def _box(line: Timeline, rank: int, span: Span, y: int, scale: float, critical: bool) -> str:
    x, wide = _LEFT + span.start * scale, (span.end - span.start) * scale
    later = _is_later_stage(line, rank, span)
    colour, ink = _COLOURS[span.action.kind][later], "#202124" if later else "#ffffff"
    edge = ' stroke="#d93025" stroke-width="2"' if critical else ' stroke="#ffffff"'
    unit = line.ticks.per_unit
    tip = f"{span.action}: {_number(span.start / unit)} to {_number(span.end / unit)}"
    box = (
        f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW - 4}" fill="{colour}"{edge}>'
        f"<title>{escape(tip)}</title></rect>"
    )
    if wide < _NARROWEST_LABEL:
        return box
    label = "&amp;".join(str(part.microbatch) for part in span.action.computations)
    return box + (
        f'<text x="{x + wide / 2:.2f}" y="{y + 13}" text-anchor="middle" fill="{ink}" '
        f'pointer-events="none">{label}</text>'
    )


def draw_html(
    *lines: Timeline, titles: Sequence[str] = (), width: int = 1200, unit: str = ""
) -> str:
    """A page without scripts or links: the picture, what colours mean, the critical path in words.

    Args:
        lines: What to draw.
        titles: What each one is.
        width: Of the picture, in pixels.
        unit: Of time, such as "ms"; by default whatever the costs are in.
    """
    names = {
        Kind.FORWARD: "forward",
        Kind.BACKWARD: "full backward",
        Kind.BACKWARD_INPUT: "backward of inputs",
        Kind.BACKWARD_WEIGHT: "backward of weights",
        Kind.OVERLAP: "overlapped pair",
    }
    legend = " ".join(
        f'<span style="background:{_COLOURS[kind][0]};color:#ffffff;padding:2px 6px">'
        f"{_LETTERS[kind]}</span> {name}"
        for kind, name in names.items()
    )
    paths = "".join(
        f"<h2>{escape(_summary(line, titles[index] if index < len(titles) else ''))}</h2>"
        f"<p>Critical path: {escape(path_text(line))}</p>"
        for index, line in enumerate(lines)
    )
    name = escape(lines[0].schedule.name or "schedule") if lines else "schedule"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{name}</title></head>\n"
        '<body style="font-family:sans-serif;color:#202124;background:#ffffff">\n'
        f"<p>{legend}; lighter: a rank's later stages; red edge: critical path.</p>\n"
        f"{draw_svg(*lines, titles=titles, width=width, unit=unit)}{paths}\n</body></html>\n"
    )


def path_text(line: Timeline) -> str:
    """The critical path, its unbroken stretches on one rank shortened to first and last."""
    runs: list[tuple[int, list[Span]]] = []
    for rank, span in line.critical_path:
        if not runs or runs[-1][0] != rank:
            runs.append((rank, []))
        runs[-1][1].append(span)
    return " → ".join(
        f"rank {rank}: {spans[0].action}"
        + (f" … {spans[-1].action} ({len(spans)} actions)" if len(spans) > 1 else "")
        for rank, spans in runs
    )


def draw_text(
    *lines: Timeline, titles: Sequence[str] = (), width: int = 100, colour: bool = False
) -> str:
    """Lines for a terminal: a letter a slice of time, small for a rank's later stages.

    Args:
        lines: What to draw, on one scale of time.
        titles: What each one is.
        width: Of a line, in characters; at least 40.
        colour: Mark kinds by ANSI colours.
    """
    columns = max(width, 40) - 36
    longest = max(float(line.makespan) for line in lines)
    text = []
    for index, line in enumerate(lines):
        text.append(_summary(line, titles[index] if index < len(titles) else ""))
        slices = max(1, round(columns * float(line.makespan) / longest)) if longest else 1
        for rank in range(line.schedule.ranks):
            idle = 100 * float(1 - line.busy[rank] / line.makespan) if line.makespan else 0.0
            cells = _cells(line, rank, slices, colour) + " " * (columns - slices)
            peak = _number(line.peak_memory[rank])
            text.append(f"rank {rank:<4}|{cells}| idle {idle:4.1f}%, peak {peak}")
    return "\n".join(text) + "\n"


def _cells(line: Timeline, rank: int, slices: int, colour: bool) -> str:
    cells, row, at = [], line.spans[rank], 0
    for column in range(slices):
        # The middle of the slice, in halves of ticks over slices, so that nothing is rounded.
        now = (2 * column + 1) * line.end
        while at < len(row) and row[at].end * 2 * slices <= now:
            at += 1
        if at == len(row) or row[at].start * 2 * slices > now:
            cells.append("·")
            continue
        kind = row[at].action.kind
        letter = _LETTERS[kind]
        letter = letter.lower() if _is_later_stage(line, rank, row[at]) else letter
        cells.append(f"\x1b[{_ANSI[kind]}m{letter}\x1b[0m" if colour else letter)
    return "".join(cells)
