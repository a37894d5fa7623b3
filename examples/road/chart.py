"""Curves as SVG, colored by the page's style: no script, no network.

A line has a class, `c0`, `c1`, ..., and so a color in light and in dark.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

from attrs import frozen

WIDTH, HEIGHT = 400, 240
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 40
MOST_POINTS = 300

Place = Callable[[float, float], tuple[float, float]]
"""From a point of the data to its place in the drawing."""


@frozen(kw_only=True)
class Line:
    """Points that are joined."""

    name: str
    points: Sequence[tuple[float, float]]
    """x and y; those that are not finite are left out."""
    marked: bool = False
    """Draw a dot at each point too."""
    joined: bool = True


def ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers that enclose two."""
    span = high - low or abs(high) or 1.0
    raw = span / 4
    base = 10.0 ** math.floor(math.log10(raw))
    step = base * next((each for each in (1, 2, 2.5, 5) if each * base >= raw), 10)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [at * step for at in range(first, max(last, first + 1) + 1)]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS` points: means of neighbors, the last point itself."""
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    width = math.ceil(len(points) / MOST_POINTS)
    if width <= 1:
        return list(points)
    groups = [points[at : at + width] for at in range(0, len(points), width)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def curves(title: str, lines: Sequence[Line], *, x_name: str, y_name: str) -> str:
    """Draw lines over axes with round ticks, and a legend; a note where there are no points."""
    drawn = [(number, line, thinned(line.points)) for number, line in enumerate(lines)]
    every = [point for _, _, points in drawn for point in points]
    head = f"<figure><figcaption>{escape(title)}</figcaption>"
    if not every:
        return head + "<p class='soft'>nothing was recorded</p></figure>"
    xs = ticks(min(x for x, _ in every), max(x for x, _ in every))
    ys = ticks(min(y for _, y in every), max(y for _, y in every))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - xs[0]) / (xs[-1] - xs[0])
        up = (y - ys[0]) / (ys[-1] - ys[0])
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * across,
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * up,
        )

    parts = axes(xs, ys, place=place, x_name=x_name, y_name=y_name)
    for number, line, points in drawn:
        spots = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        if line.joined:
            parts.append(f'<polyline class="line c{number}" points="{path}"/>')
        if line.marked:
            parts += [
                f'<circle class="dot c{number}" cx="{a:.1f}" cy="{b:.1f}" r="3">'
                f"<title>{escape(line.name)}: {x:g}, {y:.4g}</title></circle>"
                for (a, b), (x, y) in zip(spots, points, strict=True)
            ]
    names = "".join(f'<span><i class="c{n}"></i>{escape(line.name)}</span>' for n, line, _ in drawn)
    legend = f'<p class="legend">{names}</p>' if len(drawn) > 1 else ""
    return (
        f'{head}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>{legend}</figure>"
    )


def axes(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    place: Place,
    x_name: str,
    y_name: str,
) -> list[str]:
    """The grid, the numbers beside it, and what they count."""
    parts = []
    for tick in ys:
        _, y = place(xs[0], tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="end" x="{LEFT - 6}" y="{y + 4:.1f}">{tick:g}</text>'
        )
    for tick in xs:
        x, _ = place(tick, ys[0])
        parts.append(f'<text class="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">{tick:g}</text>')
    parts.append(
        f'<text class="middle" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">'
        f"{escape(x_name)}</text>"
        f'<text class="middle" transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
        f"{escape(y_name)}</text>"
    )
    return parts
