"""`ms-profile report`: analyse a run's traces and write the page."""

import argparse
from collections.abc import Sized
from pathlib import Path
from typing import Final

import msgspec

from ms_profile.analysis import analyse
from ms_profile.errors import FormatError
from ms_profile.link import LinkMatrix
from ms_profile.perfetto import export_perfetto
from ms_profile.report import build_facts, write_report

__all__ = ["EXAMPLE", "HELP", "add_arguments", "execute"]

HELP: Final = "analyse traces and write one offline HTML report"
EXAMPLE: Final = "ms-profile report ./profile_results --out report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("path", type=Path, help="a run's folder, a folder of traces, or a trace")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: PATH/report.html")
    parser.add_argument("--title", default="", help="of the page")
    parser.add_argument("--links", type=Path, metavar="FILE", help="what `link --out` wrote")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write a trace of all ranks")
    parser.add_argument("--most-events", type=int, default=1_000_000, metavar="N",
                        help="spans in the timeline, the longest ones; 1000000")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the facts, write no page")


def execute(options: argparse.Namespace) -> int:
    """Analyse, write, and say in a few lines what was found."""
    links = None
    if options.links is not None:
        try:
            links = msgspec.json.decode(options.links.read_bytes(), type=LinkMatrix)
        except (OSError, msgspec.DecodeError) as error:
            raise FormatError(
                f"{options.links} cannot be read: {error}; give what `ms-profile link --out` wrote"
            ) from error
    analysis = analyse(options.path)
    facts = build_facts(analysis, title=options.title, links=links)
    if options.json:
        print(msgspec.json.encode(facts).decode())
        return 0
    folder = options.path if options.path.is_dir() else options.path.parent
    out = options.out if options.out is not None else folder / "report.html"
    write_report(analysis, out, title=options.title, links=links, most_events=options.most_events)
    for warning in analysis.warnings:
        print(f"warning: {warning}")
    for finding in facts["advice"]:
        print(f"{finding['rule']}: {finding['title']} (up to {finding['share']:.1%})")
    print(f"{_count(analysis.ranks, 'rank')}, {_count(facts['advice'], 'finding')}: {out}")
    if options.perfetto is not None:
        spans = export_perfetto(analysis, options.perfetto)
        print(f"{spans} spans for ui.perfetto.dev: {options.perfetto}")
    return 0


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"
