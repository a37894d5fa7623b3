"""Draws the audits of a run: loss difference from float32, and gradient errors per group."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

from ms_parallel.engine.audit import AuditResult

COLUMNS = 60
"""Columns of the heat map; with more audits, each column shows the worst of several."""
CELL, LABEL, HEIGHT = 12, 260, 120
"""Cell size, label width and plot height in SVG units; the page scales them to the window."""
STEPS = (0.25, 0.5, 1.0, 2.0)
"""Thresholds between the colors of cells, as multiples of the alarm level."""
_STYLE = """<style>
body { font-family: sans-serif; color: #202124; background: #fff; margin: 16px; max-width: 1100px }
svg { width: 100%; height: auto } text { font: 10px sans-serif; fill: #202124 }
td, th { text-align: left; padding: 4px 12px 4px 0; overflow-wrap: anywhere }
.c0 { fill: #e6f4ea } .c1 { fill: #a8dab5 } .c2 { fill: #fdd663 } .c3 { fill: #f28b82 }
.c4 { fill: #c5221f } .line { fill: none; stroke: #1a73e8 } .level { stroke: #c5221f }
@media (prefers-color-scheme: dark) {
  body { color: #e8eaed; background: #202124 } text { fill: #e8eaed }
}
</style>"""


def draw_audits(audits: Mapping[int, AuditResult]) -> str:
    """Draw the audits of a run as an HTML page without scripts or links.

    Args:
        audits: audits by step, in ascending order.
    """
    alarms = sum(bool(audit.alarms) for audit in audits.values())
    title = f"{len(audits)} audits, {alarms} with an alarm"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n{_STYLE}</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        "<h2>Loss: difference from float32, relative</h2>\n"
        f"{_losses(audits)}<h2>Gradients: error and gain relative to the alarm level</h2>\n"
        f"{_groups(audits)}{_table(audits)}</body></html>\n"
    )


def _losses(audits: Mapping[int, AuditResult]) -> str:
    """Plot the loss differences on a log10 scale, with a line at the alarm level."""
    if not audits:
        return ""
    alarm_level = next(iter(audits.values())).levels.loss
    # A floor for the logarithm, since equal losses differ by 0.
    values = [max(audit.loss_difference, 1e-12) for audit in audits.values()]
    # Half a decade of margin above and below, and at least a decade in between.
    log_max = log10(max(*values, alarm_level, 1e-11)) + 0.5
    span = log_max - min(log10(min(*values, alarm_level)), log_max - 1) + 0.5
    width = COLUMNS * CELL

    def y(value: float) -> float:
        return round((log_max - log10(value)) / span * HEIGHT, 1)

    points = " ".join(
        f"{LABEL + index * width / max(1, len(values) - 1):.1f},{y(value)}"
        for index, value in enumerate(values)
    )
    y_alarm = y(alarm_level)
    return (
        f'<svg viewBox="0 0 {LABEL + width} {HEIGHT + 16}">'
        f'<line class="level" x1="{LABEL}" x2="{LABEL + width}" y1="{y_alarm}" y2="{y_alarm}"/>'
        f'<text x="0" y="{y_alarm + 3}">alarm {alarm_level:.0e}</text>'
        f'<polyline class="line" points="{points}"/>{_axis(list(audits), HEIGHT + 12, width)}'
        "</svg>\n"
    )


def _groups(audits: Mapping[int, AuditResult]) -> str:
    """Heat map with a row per parameter group and a column per audit; red is above the alarm."""
    names = list(dict.fromkeys(name for audit in audits.values() for name in audit.groups))
    columns = _columns(list(audits.values()))
    cells = []
    for row, name in enumerate(names):
        cells.append(f'<text x="0" y="{row * CELL + 9}">{escape(name)}</text>')
        for index, column_audits in enumerate(columns):
            worst = max(
                audit.excess(audit.groups[name]) for audit in column_audits if name in audit.groups
            )
            shade = sum(worst > step for step in STEPS)
            cells.append(
                f'<rect class="c{shade}" x="{LABEL + index * CELL}" y="{row * CELL}"'
                f' width="{CELL - 1}" height="{CELL - 1}"><title>{escape(name)}:'
                f" {worst:.2f}</title></rect>"
            )
    height, width = len(names) * CELL, max(1, len(columns)) * CELL
    return (
        f'<svg viewBox="0 0 {LABEL + COLUMNS * CELL} {height + 16}">{"".join(cells)}'
        f"{_axis(list(audits), height + 12, width)}</svg>\n"
    )


def _columns(audits: Sequence[AuditResult]) -> list[Sequence[AuditResult]]:
    # In long runs several audits share a column, which shows the worst of them.
    per_column = -(-len(audits) // COLUMNS) or 1
    return [audits[start : start + per_column] for start in range(0, len(audits), per_column)]


def _axis(steps: Sequence[int], y: int, width: int) -> str:
    if not steps:
        return ""
    last = f'<text x="{LABEL + width}" y="{y}" text-anchor="end">step {steps[-1]}</text>'
    return f'<text x="{LABEL}" y="{y}">step {steps[0]}</text>{last if len(steps) > 1 else ""}'


def _table(audits: Mapping[int, AuditResult]) -> str:
    """Table of the audits with alarms."""
    rows = []
    for step, audit in audits.items():
        if not audit.alarms:
            continue
        worst = audit.groups.get(audit.worst)
        difference = f"{worst.error:.2%}, {worst.gain:+.2%} along" if worst else ""
        rows.append(
            f"<tr><td>{step}</td><td>{audit.loss_difference:.1e}</td>"
            f"<td>{escape(audit.worst)}: {difference}</td>"
            f"<td>{escape(', '.join(audit.alarms))}</td></tr>\n"
        )
    if not rows:
        return ""
    head = "<tr><th>Step</th><th>Loss</th><th>Worst gradient</th><th>Alarms</th></tr>"
    return f"<h2>Alarms</h2>\n<table>{head}\n{''.join(rows)}</table>\n"
