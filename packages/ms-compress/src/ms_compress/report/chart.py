"""Charts drawn as SVG and colored by the page's style, without scripts or network access.

Each runtime has one CSS class (`r0`, `r1`, ...), and so the same color in every chart.
"""

import math
from collections.abc import Sequence
from html import escape

from attrs import frozen

# Sizes in units of the SVG's view box.
WIDTH = 720
ROW = 26
LEFT = 250
RIGHT = 96
LABEL_GAP = 14
LABEL_WIDTH = 14


@frozen(kw_only=True)
class Bar:
    """One row of a bar chart."""

    label: str
    value: float
    text: str
    """Shown at the end of the bar."""
    group: int
    """Index of its runtime."""


@frozen(kw_only=True)
class Point:
    """One point of a scatter chart."""

    x: float
    y: float
    label: str
    """Shown next to the point."""
    tip: str
    group: int


def bars(title: str, rows: Sequence[Bar], *, reference: float | None = None) -> str:
    """Draw one bar per row starting at zero, and a dashed line at the reference."""
    largest = max([row.value for row in rows] + [reference or 0.0]) or 1.0
    height = ROW * len(rows) + 8
    plot_width = WIDTH - LEFT - RIGHT
    parts = []
    if reference is not None:
        x = LEFT + plot_width * reference / largest
        parts.append(f'<line class="reference" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}"/>')
    for i, row in enumerate(rows):
        y = 4 + ROW * i + ROW / 2
        width = max(plot_width * row.value / largest, 1.0)
        parts.append(
            f'<text class="label" x="{LEFT - 8}" y="{y + 4:.1f}">{_short(row.label)}</text>'
            f'<rect class="r{row.group}" x="{LEFT}" y="{y - 8:.1f}" width="{width:.1f}"'
            f' height="16" rx="3"><title>{escape(row.label)}: {escape(row.text)}</title></rect>'
            f'<text class="value" x="{LEFT + width + 6:.1f}" y="{y + 4:.1f}">'
            f"{escape(row.text)}</text>"
        )
    return _figure(title, height, "".join(parts))


def scatter(title: str, points: Sequence[Point], *, x_name: str, y_name: str) -> str:
    """Draw points over axes with round ticks; overlapping labels are moved apart."""
    left, bottom, top, right, height = 80, 44, 14, 30, 340
    xs, ys = _ticks([point.x for point in points]), _ticks([point.y for point in points])

    def at_x(value: float) -> float:
        return left + (WIDTH - left - right) * (value - xs[0]) / (xs[-1] - xs[0])

    def at_y(value: float) -> float:
        return height - bottom - (height - bottom - top) * (value - ys[0]) / (ys[-1] - ys[0])

    parts = []
    for tick, text in zip(ys, _tick_labels(ys), strict=True):
        y = at_y(tick)
        parts.append(
            f'<line class="grid" x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick end" x="{left - 8}" y="{y + 4:.1f}">{text}</text>'
        )
    parts += [
        f'<text class="tick middle" x="{at_x(tick):.1f}" y="{height - bottom + 18}">{text}</text>'
        for tick, text in zip(xs, _tick_labels(xs), strict=True)
    ]
    positions = [(at_x(point.x), at_y(point.y)) for point in points]
    for point, (x, y), (label_x, label_y) in zip(
        points, positions, _place_labels(positions), strict=True
    ):
        parts.append(
            f'<circle class="r{point.group}" cx="{x:.1f}" cy="{y:.1f}" r="6">'
            f"<title>{escape(point.tip)}</title></circle>"
            f'<text class="mark" x="{label_x:.1f}" y="{label_y + 4:.1f}">'
            f"{escape(point.label)}</text>"
        )
    parts.append(
        f'<text class="axis middle" x="{(left + WIDTH - right) / 2}" y="{height - 6}">'
        f"{escape(x_name)}</text>"
        f'<text class="axis middle" transform="translate(14 {(height - bottom) / 2}) rotate(-90)">'
        f"{escape(y_name)}</text>"
    )
    return _figure(title, height, "".join(parts))


def _figure(title: str, height: float, content: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{content}</svg></figure>"
    )


def _short(label: str) -> str:
    """Shorten a long label in the middle, as its end distinguishes it from others."""
    return escape(label if len(label) <= 36 else f"{label[:14]}…{label[-21:]}")


def _ticks(values: Sequence[float]) -> list[float]:
    """Return about five round numbers that enclose the values."""
    low, high = min(values), max(values)
    # Values that differ only by rounding get a range wide enough for distinct labels.
    span = max(high - low, 1e-6 * abs(high)) if high > low else abs(high) or 1.0
    raw = span / 4
    base = 10.0 ** math.floor(math.log10(raw))
    # The next larger of 1, 2, 5 and 10 times a power of ten.
    step = base * next((m for m in (1, 2, 5) if m * base >= raw), 10)
    first, last = math.floor(low / step), math.ceil(high / step)
    if first == last:
        last += 1
    return [i * step for i in range(first, last + 1)]


def _tick_labels(ticks: Sequence[float]) -> list[str]:
    """Format ticks with enough digits to tell neighbors apart."""
    step, largest = ticks[1] - ticks[0], max(abs(ticks[0]), abs(ticks[-1]))
    if largest >= 1e6 or largest < 1e-3:
        digits = math.floor(math.log10(largest / step)) + 1
        return [f"{tick:.{digits}e}" for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def _place_labels(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Place labels to the right of their points, or at a nearby free position."""
    placed: list[tuple[float, float]] = []
    for i, (x, y) in enumerate(points):
        # Labels avoid the other points (by their left edges) and the labels placed before.
        occupied = [(a - 6, b) for j, (a, b) in enumerate(points) if j != i] + placed
        choices = [(x + dx, y + dy) for dy in (0, -LABEL_GAP, LABEL_GAP) for dx in (9, -20, -5)]
        free = [position for position in choices[:2] + choices[3:] if _is_free(position, occupied)]
        placed.append(free[0] if free else choices[0])
    return placed


def _is_free(position: tuple[float, float], occupied: Sequence[tuple[float, float]]) -> bool:
    return all(
        abs(position[0] - x) >= LABEL_WIDTH or abs(position[1] - y) >= LABEL_GAP - 2
        for x, y in occupied
    )
