"""The `import` and `export` subcommands."""

import argparse
from typing import get_args

import msgspec

from ms_data.commands.arguments import Commands, add_command
from ms_data.entry import file_argument, folder_argument, path_argument
from ms_data.exchange.exports import Format, export_dataset
from ms_data.exchange.imports import import_dataset
from ms_data.progress import show_progress
from ms_data.tokenization.tokenizer import Tokenizer


def add_import(commands: Commands) -> None:
    """Add the `import` subcommand."""
    parser = add_command(
        commands,
        _run_import,
        "import",
        "Convert Megatron .bin and .idx files or an MDS folder to shards.",
        "ms-data import corpus_text_document.idx --tokenizer tokenizer.json --out shards",
    )
    text = "PREFIX.idx, with PREFIX.bin in the same folder, or a folder with MDS's index.json"
    parser.add_argument("source", type=path_argument, metavar="SOURCE", help=text)
    text = "tokenizer.json that encoded the tokens, or will encode the text"
    parser.add_argument("--tokenizer", type=path_argument, required=True, help=text)
    parser.add_argument("--end-of-text", help="name of the token that ends a document")
    parser.add_argument("--out", type=folder_argument, required=True, help="output folder")
    text = "MDS column with the text or the tokens (default text)"
    parser.add_argument("--column", default="text", help=text)
    parser.add_argument("--shard-size-mib", type=int, default=64, help="close a shard at this size")


def add_export(commands: Commands) -> None:
    """Add the `export` subcommand."""
    parser = add_command(
        commands,
        _run_export,
        "export",
        "Convert shards to Megatron .bin and .idx files, or to Parquet.",
        "ms-data export shards --format megatron --out corpus_text_document",
    )
    parser.add_argument("shards", type=path_argument, metavar="SHARDS")
    formats = get_args(Format)
    parser.add_argument("--format", choices=formats, required=True, help="output format")
    text = "PREFIX of PREFIX.bin and PREFIX.idx, or the Parquet file"
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
    empty = f", {info.empty:,} empty ones skipped" if info.empty else ""
    split_off = f", {info.further:,} more split off at an end of text" if info.further else ""
    return info, (
        f"{options.out}: {split.documents:,} documents of {info.documents_in:,}{empty}{split_off}, "
        f"{split.tokens:,} tokens"
    )


def _run_export(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    exported = export_dataset(
        options.shards, out=options.out, target=options.format, split=options.split
    )
    return exported, (
        f"{', '.join(exported.files)}: {exported.documents:,} documents, "
        f"{exported.tokens:,} tokens, {exported.size_bytes / 1e6:,.1f} MB"
    )
