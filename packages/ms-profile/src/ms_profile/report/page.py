"""The page: summary, packed columns, style and scripts in one file that needs no network."""

import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from ms_profile.analysis.whole_run import Analysis
from ms_profile.errors import RecordError
from ms_profile.files.untrusted import check_path
from ms_profile.links.matrix import LinkMatrix
from ms_profile.log.manifest import write_whole
from ms_profile.report.payload import pack_columns
from ms_profile.report.summary import build_summary
from ms_profile.report.timeline import build_timeline

SCRIPTS = ("data.js", "format.js", "timeline.js", "timeline_input.js", "charts.js", "tables.js",
           "waits.js", "panels.js", "main.js")  # fmt: skip
MARK = re.compile(r"\{\{(title|style|summary|columns|scripts)\}\}")


def write_report(
    analysis: Analysis,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    links: LinkMatrix | None = None,
    most_events: int = 1_000_000,
    metrics: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Write the report of a run as one HTML file.

    Args:
        analysis: of `ms_profile.analyse`.
        path: the file; it appears whole or not at all.
        title: of the page.
        links: as `ms-profile link --out` measured them.
        most_events: spans that the timeline shows at most: the longest ones.
        metrics: which parts to show; those that the run was asked for, else all.

    Returns:
        What the page shows beside the timeline: `build_summary`.

    Raises:
        RecordError: no system takes the path, or something else stands there.
        OSError: the file cannot be written.
    """
    check_path("path", path, error=RecordError, written="file")
    timeline = build_timeline(analysis, most_events=most_events)
    table, packed = pack_columns(timeline.columns)
    summary = build_summary(analysis, title=title, links=links, metrics=metrics)
    drawn = {"timeline": timeline.layout, "columns": msgspec.to_builtins(table)}
    write_whole(Path(path), render(summary | drawn, packed).encode())
    return summary


def render(summary: dict[str, Any], packed: str) -> str:
    """Fill the page's template."""
    room = resources.files("ms_profile.report") / "assets"
    text = room.joinpath("page.html").read_text("utf-8")
    # A script element ends at "</" wherever that stands, inside of strings too.
    safe = msgspec.json.encode(summary).decode().replace("<", "\\u003c")
    scripts = "\n".join(room.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    parts = {
        "title": summary["title"].replace("&", "&amp;").replace("<", "&lt;"),
        "style": room.joinpath("style.css").read_text("utf-8"),
        "summary": safe,
        "columns": packed,
        "scripts": scripts,
    }
    # In one pass: what is filled in may itself hold a mark, as an operator's name does.
    return MARK.sub(lambda found: parts[found.group(1)], text)
