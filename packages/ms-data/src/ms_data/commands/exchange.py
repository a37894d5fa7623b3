"""The subcommands `import` and `export`."""

import argparse
from typing import get_args

import msgspec

from ms_data.commands.arguments import Commands, command
from ms_data.entry import file_argument, folder_argument, path_argument
from ms_data.exchange.exports import Format, export_dataset
from ms_data.exchange.imports import import_dataset
from ms_data.progress import show_progress
from ms_data.tokenization.tokenizer import Tokenizer


def add_import(commands: Commands) -> None:
    """Add `import`."""
    parser = command(
        commands,
        _run_import,
        "import",
        "Make shards of Megatron's .bin and .idx, or of a folder of MDS.",
        "ms-data import corpus_text_document.idx --tokenizer tokenizer.json --out shards",
    )
    text = "PREFIX.idx, with PREFIX.bin beside it, or a folder with MDS's index.json"
    parser.add_argument("source", type=path_argument, metavar="SOURCE", help=text)
    text = "the tokenizer that made the tokens, or is to: a tokenizer.json"
    parser.add_argument("--tokenizer", type=path_argument, required=True, help=text)
    parser.add_argument("--end-of-text", help="the token that ends a document, by its name")
    parser.add_argument("--out", type=folder_argument, required=True, help="the folder to write")
    text = "of MDS, what holds the text or the tokens (default text)"
    parser.add_argument("--column", default="text", help=text)
    parser.add_argument("--shard-size-mib", type=int, default=64, help="close a shard at this size")


def add_export(commands: Commands) -> None:
    """Add `export`."""
    parser = command(
        commands,
        _run_export,
        "export",
        "Write the documents of shards as Megatron's .bin and .idx, or as Parquet.",
        "ms-data export shards --format megatron --out corpus_text_document",
    )
    parser.add_argument("shards", type=path_argument, metavar="SHARDS")
    formats = get_args(Format)
    parser.add_argument("--format", choices=formats, required=True, help="what to write")
    text = "PREFIX of PREFIX.bin and PREFIX.idx, or the file of Parquet"
    parser.add_argument("--out", type=file_argument, required=True, help=text)
    parser.add_argument("--split", default="train", help="train (the default) or held_out")


def _run_import(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    with show_progress("importing") as on_progress:
        info = import_dataset(
            options.source,
            tokenizer=Tokenizer.load(options.tokenizer, end_of_text=options.end_of_text),
            out=options.out,
            column=options.column,
            shard_size_mib=options.shard_size_mib,
            on_progress=on_progress,
        )
    (split,) = info.splits.values()
    empty = f", {info.empty:,} without a token passed over" if info.empty else ""
    further = f", {info.further:,} begun behind an end of text" if info.further else ""
    return info, (
        f"{options.out}: {split.documents:,} documents of {info.documents_in:,}{empty}{further}, "
        f"{split.tokens:,} tokens"
    )


def _run_export(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    made = export_dataset(
        options.shards, out=options.out, target=options.format, split=options.split
    )
    return made, (
        f"{', '.join(made.files)}: {made.documents:,} documents, {made.tokens:,} tokens, "
        f"{made.size_bytes / 1e6:,.1f} MB"
    )
