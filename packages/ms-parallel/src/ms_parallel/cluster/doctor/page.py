"""Renders a report as an HTML page for wide and narrow screens."""

from html import escape

from ms_parallel.cluster.doctor.examine import DoctorReport
from ms_parallel.cluster.doctor.finding import Finding
from ms_parallel.cluster.doctor.text import location, machine_lines, measured_lines, summary

_STYLE = """<style>
body { font-family: sans-serif; color: #202124; background: #fff; margin: 16px; max-width: 960px }
h1, h2, p, td:last-child { overflow-wrap: anywhere }
td { padding: 4px 12px 4px 0; vertical-align: top; white-space: nowrap }
td:last-child { white-space: normal }
article { border-left: 4px solid; padding: 0 0 0 12px; margin: 16px 0 }
article p { color: #202124; margin: 4px 0 } h2 { font-size: 16px; margin: 0 }
body > h2 { margin: 20px 0 4px }
.failure { color: #c5221f } .warning { color: #9a6700 } .sound { color: #137333 }
.skipped { color: #5f6368 }
@media (prefers-color-scheme: dark) {
  body { color: #e8eaed; background: #202124 } article p { color: #e8eaed }
  .failure { color: #f28b82 } .warning { color: #fdd663 } .sound { color: #81c995 }
  .skipped { color: #9aa0a6 }
}
</style>"""


def draw_page(report: DoctorReport) -> str:
    """Render a report as HTML without scripts or links."""
    title = "No failures found" if report.sound else "Failures found"
    facts = [*machine_lines(report.machine), *measured_lines(report)]
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>\n" for name, text in facts
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n{_STYLE}</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f"<p>{escape(summary(report))}</p>\n{''.join(map(_article, report.findings))}"
        f"<h2>Checks</h2>\n<table>{_checks(report)}</table>\n"
        f"<h2>Rank 0</h2>\n<table>\n{rows}</table>\n</body></html>\n"
    )


def _article(finding: Finding) -> str:
    head = f"{finding.severity.capitalize()}: {finding.where}, {location(finding)}"
    what, why = escape(_sentence(finding.what)), escape(_sentence(finding.why))
    return (
        f'<article class="{finding.severity}"><h2>{escape(head)}</h2>\n'
        f"<p>{what}</p>\n<p>{why}</p>\n"
        f"<p><b>Remedy:</b> {escape(finding.remedy)}.</p></article>\n"
    )


def _sentence(text: str) -> str:
    """Capitalize a text, unless it starts with a name, and end it with a period."""
    first = text.split(maxsplit=1)[0]
    return f"{text[0].upper()}{text[1:]}." if first.isalpha() and first.islower() else f"{text}."


def _checks(report: DoctorReport) -> str:
    rows = []
    for result in report.checks:
        kind = "skipped" if result.skipped else "failure" if result.findings else "sound"
        word = "n/a" if result.skipped else f"{result.findings} found" if result.findings else "ok"
        rows.append(
            f'<tr><td>{escape(result.name)}</td><td class="{kind}">{word}</td>'
            f"<td>{escape(result.about)}</td></tr>\n"
        )
    return "".join(rows)
