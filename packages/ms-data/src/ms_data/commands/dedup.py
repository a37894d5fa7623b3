"""The `dedup` subcommand."""

import argparse

import msgspec

from ms_data.commands.arguments import (
    Commands,
    add_command,
    add_reading_arguments,
    reading_options,
    report_skipped,
)
from ms_data.commands.clean import add_writing_arguments, describe_summary
from ms_data.deduplication.dedup import dedup
from ms_data.deduplication.options import DedupOptions
from ms_data.progress import show_progress


def add_dedup(commands: Commands) -> None:
    """Add the `dedup` subcommand."""
    parser = add_command(
        commands,
        _run_dedup,
        "dedup",
        "Remove exact and near duplicates, and record which document each one duplicates.",
        "ms-data dedup cleaned --out unique --keep longest --substring-words 50",
    )
    add_reading_arguments(parser, strict=True)
    add_writing_arguments(parser)
    # Help texts show the defaults of the options class.
    defaults = DedupOptions()
    for name, text in (
        ("exact", "exact duplicates"),
        ("minhash", "near duplicates, found by MinHash LSH"),
    ):
        action = argparse.BooleanOptionalAction
        parser.add_argument(f"--{name}", action=action, default=True, help=f"drop {text}")
    for name, value, text in (
        ("bands", defaults.bands, "bands per signature"),
        ("rows", defaults.rows, "hashes per band; P(match) = 1 - (1 - similarity^rows)^bands"),
        ("ngram-words", defaults.ngram_words, "words per n-gram"),
        ("substring-words", 0, "cut repeated spans of at least this many words; 0: off"),
    ):
        help_text = f"{text} (default {value})"
        parser.add_argument(f"--{name}", type=int, default=value, help=help_text)
    choices = ("first", "longest", "priority")
    text = "document to keep from each group of duplicates (default first)"
    parser.add_argument("--keep", choices=choices, default="first", help=text)
    parser.add_argument(
        "--priority",
        action="append",
        default=[],
        metavar="PATTERN",
        help="with --keep priority: preferred files, such as wiki/*; repeat, most preferred first",
    )


def _run_dedup(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    dedup_options = DedupOptions(
        exact=options.exact,
        minhash=options.minhash,
        bands=options.bands,
        rows=options.rows,
        ngram_words=options.ngram_words,
        substring_words=options.substring_words,
        keep=options.keep,
        priority=options.priority,
    )
    with show_progress("deduplicating") as on_progress:
        summary = dedup(
            options.corpus,
            out=options.out,
            options=dedup_options,
            workers=options.workers,
            shard_size_mib=options.shard_size_mib,
            **reading_options(options),
            strict=options.strict,
            on_progress=on_progress,
            on_quarantine=report_skipped,
        )
    return summary, describe_summary(summary)
