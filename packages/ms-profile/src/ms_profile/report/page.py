"""Write the HTML page: summary, packed columns, style and scripts in one offline file."""

import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from ms_profile.analysis.memory_use import CATEGORIES, MemoryUse
from ms_profile.analysis.whole_run import Analysis
from ms_profile.arguments import check_integer, check_items, check_type
from ms_profile.errors import MetricError, RecordError, TraceError
from ms_profile.files.untrusted import check_path
from ms_profile.links.matrix import LinkMatrix
from ms_profile.log.manifest import write_atomically
from ms_profile.report.payload import pack_columns
from ms_profile.report.summary import build_summary
from ms_profile.report.timeline import build_timeline

SCRIPTS = ("data.js", "format.js", "timeline.js", "timeline_input.js", "charts.js", "tables.js",
           "waits.js", "panels.js", "main.js")  # fmt: skip
MEMORY_SCRIPTS = ("data.js", "format.js", "tables.js", "memory.js")
MARK = re.compile(r"\{\{(title|style|summary|columns|scripts|connect)\}\}")


def write_report(
    analysis: Analysis,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    links: LinkMatrix | None = None,
    max_events: int = 1_000_000,
    metrics: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Write the report of a run as one HTML file.

    Args:
        analysis: result of `ms_profile.analyse`.
        path: file to write; it appears complete or not at all.
        title: title of the page.
        links: link matrix from `ms-profile link --out`.
        max_events: maximum number of spans in the timeline; the longest ones are shown.
        metrics: metrics to show. None: the run's metrics, or all if unknown.

    Returns:
        The summary that the page shows next to the timeline; see `build_summary`.

    Raises:
        RecordError: the path is invalid, or something other than a file exists there.
        OSError: the file cannot be written.
    """
    check_path("path", path, error=RecordError, written="file")
    check_type("analysis", analysis, Analysis, "an Analysis, as analyse returns", error=TraceError)
    check_type("title", title, str, "a string", error=TraceError)
    check_type("links", links, LinkMatrix, "a LinkMatrix", error=TraceError, optional=True)
    check_integer("max_events", max_events, minimum=1, error=TraceError)
    if metrics is not None:
        check_items("metrics", metrics, str, "names of metrics", error=MetricError)
    timeline = build_timeline(analysis, max_events=max_events)
    table, packed = pack_columns(timeline.columns)
    summary = build_summary(analysis, title=title, links=links, metrics=metrics)
    page_data = {"timeline": timeline.layout, "columns": msgspec.to_builtins(table)}
    write_atomically(Path(path), render(summary | page_data, packed).encode())
    return summary


def write_memory_page(
    devices: Sequence[MemoryUse], path: str | os.PathLike[str], *, title: str = "Memory"
) -> None:
    """Write the memory analysis of one or more devices as one offline HTML file.

    Args:
        devices: result of `analyse_memory`.
        path: file to write; it appears complete or not at all.
        title: title of the page.

    Raises:
        RecordError: the path is invalid, or something other than a file exists there.
        OSError: the file cannot be written.
    """
    check_path("path", path, error=RecordError, written="file")
    check_items("devices", devices, MemoryUse, "results of analyse_memory", error=TraceError)
    summary = {
        "title": title, "columns": [], "devices": list(devices), "descriptions": CATEGORIES
    }  # fmt: skip
    write_atomically(Path(path), render(summary, "", MEMORY_SCRIPTS).encode())


def render(
    summary: dict[str, Any], packed: str, script_names: Sequence[str] = SCRIPTS, *,
    connect: bool = False,
) -> str:  # fmt: skip
    """Fill in the page's template; `connect` lets its scripts send requests to its server."""
    assets = resources.files("ms_profile.report") / "assets"
    text = assets.joinpath("page.html").read_text("utf-8")
    # "</" would end the script element, even inside a string.
    safe = msgspec.json.encode(summary).decode().replace("<", "\\u003c")
    scripts = "\n".join(assets.joinpath(name).read_text("utf-8") for name in script_names)
    parts = {
        "title": summary["title"].replace("&", "&amp;").replace("<", "&lt;"),
        "style": assets.joinpath("style.css").read_text("utf-8"),
        "summary": safe,
        "columns": packed,
        "scripts": scripts,
        "connect": "; connect-src 'self'" if connect else "",
    }
    # Replaced in one pass, as inserted text may contain a mark, for example in an operator's name.
    return MARK.sub(lambda match: parts[match.group(1)], text)
