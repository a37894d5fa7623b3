"""Arguments that several subcommands share."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from ms_data.corpus.places import is_remote
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.entry import CommandParser, one_line, path_argument

Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"
"""The group that subcommands are added to."""

_CORPUS = (
    "files, folders or URLs such as s3://bucket/folder, read in this order; "
    "or stdlib, the sources of Python's standard library"
)
_READ = """corpus formats, detected by name and content; text may be compressed (.gz, .zst):
  one document per file   any UTF-8 text
  one document per row    .jsonl .ndjson    JSON Lines
                          .csv .tsv         a header line, then rows
                          .parquet          Parquet (extra parquet)
                          .arrow .feather   Arrow files and streams (extra parquet)
                          a folder saved by datasets (extra parquet)
  archives                .tar              WebDataset: .txt or .json by key
                          .warc .wet        web archives (extra warc)
  remote files            s3://, memory://  any fsspec file system (extra remote)

"""


def add_command(
    commands: Commands,
    run: Callable[[argparse.Namespace], tuple[msgspec.Struct, str]],
    name: str,
    text: str,
    example: str,
) -> CommandParser:
    """Add a subcommand that prints a result record as text or JSON."""
    parser = commands.add_parser(name, help=text, description=text, example=example)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)
    return parser


def add_reading_arguments(parser: CommandParser, *, strict: bool = False) -> None:
    """Add the arguments of corpus reading.

    Args:
        parser: parser of the subcommand.
        strict: offer `--strict`, for commands that skip unreadable documents by default.
    """
    parser.epilog = f"{_READ}{parser.epilog}"
    parser.add_argument("corpus", type=_corpus_argument, nargs="+", metavar="CORPUS", help=_CORPUS)
    parser.add_argument(
        "--text-column", default="text", help="column or key with a row's text (default text)"
    )
    if strict:
        text = "stop at an unreadable document instead of reporting and skipping it"
        parser.add_argument("--strict", action="store_true", help=text)
    else:
        invalid = parser.add_mutually_exclusive_group()
        text = "stop at a document that is not valid text (the default)"
        invalid.add_argument("--strict", action="store_true", help=text)
        text = "report and skip documents that are not valid text"
        invalid.add_argument("--skip-invalid", action="store_true", help=text)
    limit = f"largest document, uncompressed (default {DOCUMENT_LIMIT_MIB})"
    parser.add_argument("--document-limit-mib", type=int, default=DOCUMENT_LIMIT_MIB, help=limit)


def add_shard_argument(parser: CommandParser) -> None:
    """Add `--shard`, which splits the work over an array of jobs."""
    text = "process part I of N (1/N to N/N); merge/N then combines all parts into OUT"
    parser.add_argument("--shard", metavar="I/N", help=text)


def workers_argument(text: str) -> int | str:
    """Parse a number of processes or the address of a Ray cluster."""
    if text == "ray" or text.startswith("ray://"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number, ray or ray://HOST:PORT, got {one_line(text)!r}"
        ) from None


def reading_options(options: argparse.Namespace, *extra_names: str) -> dict[str, Any]:
    """Return the parsed values of `add_reading` and `add_shard` as keyword arguments."""
    names = ("text_column", "document_limit_mib", "shard", *extra_names)
    return {name: getattr(options, name) for name in names}


def _corpus_argument(text: str) -> str:
    return text if is_remote(text) else str(path_argument(text))


def report_skipped(reason: str) -> None:
    """Report a skipped document on stderr."""
    sys.stderr.write(f"skipped: {one_line(reason)}\n")
