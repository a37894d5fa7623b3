"""Draws timelines as an HTML page for wide and narrow screens."""

from collections.abc import Sequence
from html import escape

from ms_parallel.schedules.drawing.svg import draw_svg
from ms_parallel.schedules.drawing.text import path_text, summary
from ms_parallel.schedules.timeline.simulate import Timeline

_PHONE = 404
"""Width of the narrow picture, in pixels."""
_STYLE = """<style>
body { font-family: sans-serif; color: #202124; background: #ffffff; margin: 8px }
.phone { display: none }
p, h2 { overflow-wrap: anywhere } h2 { font-size: 16px }
@media (max-width: 640px) { .wide { display: none } .phone { display: block } }
@media (prefers-color-scheme: dark) { body { color: #e8eaed; background: #202124 } }
</style>"""
"""Narrow screens show the narrow picture."""


def draw_html(
    *lines: Timeline, titles: Sequence[str] = (), width: int = 1200, unit: str = ""
) -> str:
    """Draw a page without scripts or links: picture, legend and critical path.

    Args:
        lines: timelines to draw.
        titles: title of each timeline.
        width: width of the picture, in pixels.
        unit: unit of time, such as "ms"; by default no unit is shown.
    """
    paths = "".join(
        f"<h2>{escape(summary(line, titles, index))}</h2>"
        f"<p>Critical path: {escape(path_text(line))}</p>"
        for index, line in enumerate(lines)
    )
    name = escape(lines[0].schedule.name or "schedule") if lines else "schedule"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title>\n{_STYLE}</head>\n<body>\n"
        f'<div class="wide">\n{draw_svg(*lines, titles=titles, width=width, unit=unit)}</div>\n'
        f'<div class="phone">\n{draw_svg(*lines, titles=titles, width=_PHONE, unit=unit)}</div>\n'
        f"{paths}\n</body></html>\n"
    )
