"""The subcommands `clean`, `stats` and `init`."""

import argparse
from pathlib import Path

import msgspec

from ms_data.cleaning.clean import clean
from ms_data.cleaning.rule_file import rules_template
from ms_data.commands.arguments import (
    Commands,
    add_reading,
    add_shard,
    command,
    name_left_out,
    reading_options,
    workers_argument,
)
from ms_data.entry import CommandParser, file_argument, folder_argument, path_argument
from ms_data.passes.page import draw_stats
from ms_data.passes.record import LedgerSummary
from ms_data.progress import show_progress
from ms_data.settings.template import write_template


class Written(msgspec.Struct, frozen=True):
    """A file that was written."""

    path: str | None
    """None: to standard output."""


def add_clean(commands: Commands) -> None:
    """Add `clean`."""
    parser = command(
        commands,
        _run_clean,
        "clean",
        "Keep, change and drop documents by rules, and say what became of each.",
        "ms-data clean corpus/ RULES.toml --out cleaned",
    )
    add_reading(parser, strict=True)
    parser.add_argument(
        "rules", type=path_argument, metavar="RULES.toml", help="`ms-data init clean` writes one"
    )
    add_writing(parser)


def add_writing(parser: CommandParser) -> None:
    """Add what decides how documents are written."""
    text = "the folder to write, which `ms-data build` reads; must not hold anything"
    parser.add_argument("--out", type=folder_argument, required=True, help=text)
    text = "processes (default: one a core), or a Ray cluster: ray, or ray://HOST:PORT"
    parser.add_argument("--workers", type=workers_argument, metavar="N", help=text)
    add_shard(parser)
    parser.add_argument("--shard-size-mib", type=int, default=64, help="close a file at this size")


def add_stats(commands: Commands) -> None:
    """Add `stats`."""
    parser = command(
        commands,
        _run_stats,
        "stats",
        "Draw what became of a corpus as one HTML page, which needs no network.",
        "ms-data stats cleaned --out cleaned.html",
    )
    parser.add_argument("folder", type=path_argument, metavar="FOLDER", help="of clean or dedup")
    parser.add_argument("--out", type=file_argument, required=True, help="the page to write")


def add_init(commands: Commands) -> None:
    """Add `init`."""
    parser = command(
        commands,
        _run_init,
        "init",
        "Write a file of rules to begin with: every rule and setting, with what it means.",
        "ms-data init clean --out RULES.toml",
    )
    parser.add_argument("kind", choices=["clean"], help="what the file is for")
    parser.add_argument("--out", type=file_argument, help="the file (default: standard output)")


def describe(summary: LedgerSummary) -> str:
    """Write what a pass kept and dropped, in one line and one for each reason."""
    done = "done before, nothing to do: " if summary.done_before else ""
    dropped = sum(summary.dropped.values())
    quarantined = f", {summary.quarantined:,} that cannot be read" if summary.quarantined else ""
    head = (
        f"{summary.folder}: {done}{summary.documents:,} documents, {summary.kept:,} kept, "
        f"{dropped:,} dropped{quarantined}{summary.omissions}; {summary.bytes_in / 1e6:,.1f} MB "
        f"in, {summary.bytes_out / 1e6:,.1f} MB kept"
    )
    lines = (f"  {count:>9,}  {reason}" for reason, count in summary.dropped.items())
    return "\n".join((head, *lines))


def _run_clean(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    with show_progress("cleaning") as on_progress:
        summary = clean(
            options.corpus,
            options.rules,
            out=options.out,
            workers=options.workers,
            shard_size_mib=options.shard_size_mib,
            **reading_options(options),
            strict=options.strict,
            on_progress=on_progress,
            on_quarantine=name_left_out,
        )
    return summary, describe(summary)


def _run_stats(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    draw_stats(options.folder, out=options.out)
    return Written(str(options.out)), str(options.out)


def _run_init(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    out: Path | None = options.out
    if not write_template(rules_template(), out):
        return Written(None), ""
    return Written(str(out)), f"{out}: change what is to be kept, then `ms-data clean` reads it"
