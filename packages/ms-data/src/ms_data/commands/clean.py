"""The `clean`, `stats` and `init` subcommands."""

import argparse
from pathlib import Path

import msgspec

from ms_data.cleaning.clean import clean
from ms_data.cleaning.rule_file import rules_template
from ms_data.commands.arguments import (
    Commands,
    add_command,
    add_reading_arguments,
    add_shard_argument,
    reading_options,
    report_skipped,
    workers_argument,
)
from ms_data.entry import CommandParser, file_argument, folder_argument, path_argument
from ms_data.ledger.page import draw_stats
from ms_data.ledger.record import LedgerSummary
from ms_data.progress import show_progress
from ms_data.settings.run_file import add_overrides, read_settings
from ms_data.settings.template import write_template


class WrittenFile(msgspec.Struct, frozen=True):
    """Result of a command that writes one file."""

    path: str | None
    """None: standard output."""


def add_clean(commands: Commands) -> None:
    """Add the `clean` subcommand."""
    parser = add_command(
        commands,
        _run_clean,
        "clean",
        "Filter and edit documents by rules, and record the outcome of every document.",
        "ms-data clean corpus/ RULES.toml --out cleaned",
    )
    add_reading_arguments(parser, strict=True)
    parser.add_argument(
        "rules", type=path_argument, metavar="RULES.toml", help="see `ms-data init clean`"
    )
    add_overrides(parser)
    add_writing_arguments(parser)


def add_writing_arguments(parser: CommandParser) -> None:
    """Add the arguments of document output."""
    text = "output folder, for `ms-data build`; must be empty or not exist"
    parser.add_argument("--out", type=folder_argument, required=True, help=text)
    text = "processes (default: one per core), or a Ray cluster: ray or ray://HOST:PORT"
    parser.add_argument("--workers", type=workers_argument, metavar="N", help=text)
    add_shard_argument(parser)
    parser.add_argument("--shard-size-mib", type=int, default=64, help="close a file at this size")


def add_stats(commands: Commands) -> None:
    """Add the `stats` subcommand."""
    parser = add_command(
        commands,
        _run_stats,
        "stats",
        "Write an HTML report of a clean or dedup run, for offline viewing.",
        "ms-data stats cleaned --out cleaned.html",
    )
    parser.add_argument(
        "folder", type=path_argument, metavar="FOLDER", help="output of clean or dedup"
    )
    parser.add_argument("--out", type=file_argument, required=True, help="HTML file to write")


def add_init(commands: Commands) -> None:
    """Add the `init` subcommand."""
    parser = add_command(
        commands,
        _run_init,
        "init",
        "Write a starting rule file that documents every rule and setting.",
        "ms-data init clean --out RULES.toml",
    )
    parser.add_argument("kind", choices=["clean"], help="command that reads the file")
    parser.add_argument("--out", type=file_argument, help="output file (default: standard output)")


def describe_summary(summary: LedgerSummary) -> str:
    """Format a summary: one line of totals, then one line per reason for dropping."""
    prefix = "done before, nothing to do: " if summary.done_before else ""
    dropped = sum(summary.dropped.values())
    quarantined = f", {summary.quarantined:,} unreadable" if summary.quarantined else ""
    totals = (
        f"{summary.folder}: {prefix}{summary.documents:,} documents, {summary.kept:,} kept, "
        f"{dropped:,} dropped{quarantined}{summary.omissions}; {summary.bytes_in / 1e6:,.1f} MB "
        f"in, {summary.bytes_out / 1e6:,.1f} MB kept"
    )
    lines = (f"  {count:>9,}  {reason}" for reason, count in summary.dropped.items())
    return "\n".join((totals, *lines))


def _run_clean(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    # argparse gives all but the last word to CORPUS, so overrides are split off here.
    words, overrides = [*options.corpus, str(options.rules)], list(options.set)
    while len(words) > 2 and "=" in words[-1]:
        overrides.insert(0, words.pop())
    rules = read_settings(words[-1], overrides) if overrides else words[-1]
    with show_progress("cleaning") as on_progress:
        summary = clean(
            words[:-1],
            rules,
            out=options.out,
            workers=options.workers,
            shard_size_mib=options.shard_size_mib,
            **reading_options(options),
            strict=options.strict,
            on_progress=on_progress,
            on_quarantine=report_skipped,
        )
    return summary, describe_summary(summary)


def _run_stats(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    draw_stats(options.folder, out=options.out)
    return WrittenFile(str(options.out)), str(options.out)


def _run_init(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    out: Path | None = options.out
    if not write_template(rules_template(), out):
        return WrittenFile(None), ""
    return WrittenFile(str(out)), f"{out}: edit the rules, then pass the file to `ms-data clean`"
