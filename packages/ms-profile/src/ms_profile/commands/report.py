"""`ms-profile report`: analyze a run's traces and write the HTML report."""

import argparse
import sys
from collections.abc import Sized
from typing import Final

import msgspec

from ms_profile.analysis.whole_run import analyse
from ms_profile.commands.printable import plain
from ms_profile.entry import CommandParser, file_argument, path_argument
from ms_profile.errors import TraceError
from ms_profile.links.matrix import read_links
from ms_profile.metrics import METRICS, parse_metrics
from ms_profile.report.page import write_report
from ms_profile.report.perfetto import export_perfetto
from ms_profile.report.summary import build_summary
from ms_profile.used_settings import UsedIf

HELP: Final = "analyze traces and write one offline HTML report"
EXAMPLE: Final = "ms-profile report ./profile_results --out report.html"


def add_arguments(parser: CommandParser) -> None:
    """Add the command's arguments to the parser."""
    parser.used_if = (
        UsedIf("out perfetto max_events", "without --json", lambda options: not options.json),
    )
    parser.add_argument(
        "path",
        type=path_argument,
        help="a run's folder, a folder of traces, a single trace, or a recorder's ring",
    )
    parser.add_argument(
        "--out", type=file_argument, metavar="FILE", help="default: PATH/report.html"
    )
    parser.add_argument("--title", default="", help="title of the page")
    parser.add_argument("--window", type=int, metavar="N",
                        help="window of traced steps, from 1; default: the last")  # fmt: skip
    parser.add_argument("--metrics", metavar="NAMES",
                        help=f"comma-separated report sections, of {', '.join(METRICS)}; default: "
                        "the metrics of the run")  # fmt: skip
    parser.add_argument(
        "--links", type=path_argument, metavar="FILE", help="link matrix from `link --out`"
    )
    parser.add_argument(
        "--perfetto", type=file_argument, metavar="FILE", help="also write a trace of all ranks"
    )
    parser.add_argument("--max-events", type=int, default=1_000_000, metavar="N",
                        help="maximum number of spans in the timeline, longest first; "
                        "default: 1000000")  # fmt: skip
    parser.add_argument(
        "--json", action="store_true", help="print the summary as JSON and write no page"
    )


def execute(options: argparse.Namespace) -> int:
    """Analyze the run, write the page and print the findings."""
    links = None
    if options.links is not None:
        links = read_links(options.links)
    if options.max_events < 1:
        raise TraceError(
            f"--max-events must be at least 1, got {options.max_events}; the default is 1000000"
        )
    if options.window is not None and options.window < 1:
        raise TraceError(
            f"--window must be at least 1, got {options.window}; windows are counted from 1"
        )
    metrics = parse_metrics(options.metrics) if options.metrics else None
    analysis = analyse(options.path, window=options.window)
    if options.json:
        summary = build_summary(analysis, title=options.title, links=links, metrics=metrics)
        print(msgspec.json.encode(summary).decode())
        return 0
    folder = options.path if options.path.is_dir() else options.path.parent
    out = options.out if options.out is not None else folder / "report.html"
    summary = write_report(analysis, out, title=options.title, links=links,
                           max_events=options.max_events, metrics=metrics)  # fmt: skip
    for warning in analysis.warnings:
        print(f"ms-profile: warning: {plain(warning)}", file=sys.stderr)
    for finding in summary["advice"]:
        print(f"{finding['rule']}: {plain(finding['title'])} (up to {finding['gain_share']:.1%})")
    print(f"{_count(analysis.ranks, 'rank')}, {_count(summary['advice'], 'finding')}: {out}")
    if options.perfetto is not None:
        spans = export_perfetto(analysis, options.perfetto)
        print(f"{spans} spans for ui.perfetto.dev: {options.perfetto}")
    return 0


def _count(items: Sized, name: str) -> str:
    return f"{len(items)} {name}{'' if len(items) == 1 else 's'}"
