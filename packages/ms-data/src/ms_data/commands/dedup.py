"""The subcommand `dedup`."""

import argparse

import msgspec

from ms_data.commands.arguments import (
    Commands,
    add_reading,
    command,
    name_left_out,
    reading_options,
)
from ms_data.commands.clean import add_writing, describe
from ms_data.deduplication.dedup import dedup
from ms_data.deduplication.options import DedupOptions
from ms_data.progress import show_progress


def add_dedup(commands: Commands) -> None:
    """Add `dedup`."""
    parser = command(
        commands,
        _run_dedup,
        "dedup",
        "Keep one of the documents that are the same, or nearly, and say which.",
        "ms-data dedup cleaned --out unique --keep longest --substring-words 50",
    )
    add_reading(parser, strict=True)
    add_writing(parser)
    usual = DedupOptions()
    for name, text in (
        ("exact", "the same text"),
        ("minhash", "nearly the same text, by MinHash and bands"),
    ):
        action = argparse.BooleanOptionalAction
        parser.add_argument(f"--{name}", action=action, default=True, help=f"drop {text}")
    for name, value, text in (
        ("bands", usual.bands, "bands of a signature"),
        ("rows", usual.rows, "hashes of a band; alike with 1 - (1 - similarity^rows)^bands"),
        ("ngram-words", usual.ngram_words, "words of the n-grams that are compared"),
        ("substring-words", 0, "cut rows of so many words that stood before; 0: none"),
    ):
        help_text = f"{text} (default {value})"
        parser.add_argument(f"--{name}", type=int, default=value, help=help_text)
    choices = ("first", "longest", "priority")
    text = "which one of those that are alike (default first)"
    parser.add_argument("--keep", choices=choices, default="first", help=text)
    parser.add_argument(
        "--priority",
        action="append",
        default=[],
        metavar="PATTERN",
        help="with --keep priority: files to prefer, as wiki/*; the best first",
    )


def _run_dedup(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    chosen = DedupOptions(
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
            options=chosen,
            workers=options.workers,
            shard_size_mib=options.shard_size_mib,
            **reading_options(options),
            strict=options.strict,
            on_progress=on_progress,
            on_quarantine=name_left_out,
        )
    return summary, describe(summary)
