"""The arguments that several subcommands take."""

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from ms_data.corpus.places import is_remote
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.entry import CommandParser, one_line, path_argument

Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"
"""What subcommands are added to."""

_CORPUS = (
    "files or folders, read in this order, or addresses such as s3://bucket/folder; "
    "or stdlib, the running Python's own library sources"
)
_READ = """what a corpus may hold, told by name and content; text may be packed (.gz, .zst):
  a document a file   any UTF-8 text
  a row a document    .jsonl .ndjson    JSON Lines
                      .csv .tsv         a line of names, then fields
                      .parquet          Parquet (extra parquet)
                      .arrow .feather   Arrow files and streams (extra parquet)
                      a folder saved by datasets (extra parquet)
  others              .tar              WebDataset: .txt or .json by key
                      .warc .wet        web archives (extra warc)
  from elsewhere      s3://, memory://  whatever fsspec reaches (extra remote)

"""


def command(
    commands: Commands,
    run: Callable[[argparse.Namespace], tuple[msgspec.Struct, str]],
    name: str,
    text: str,
    line: str,
) -> CommandParser:
    """Add a subcommand that prints facts."""
    parser = commands.add_parser(name, help=text, description=text, example=line)
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.set_defaults(run=run)
    return parser


def add_reading(parser: CommandParser, *, strict: bool = False) -> None:
    """Add what decides how a corpus is read.

    Args:
        parser: of the subcommand.
        strict: what cannot be read is left out, unless asked otherwise.
    """
    parser.epilog = f"{_READ}{parser.epilog}"
    parser.add_argument("corpus", type=_corpus_argument, nargs="+", metavar="CORPUS", help=_CORPUS)
    parser.add_argument(
        "--text-column", default="text", help="what holds the text of a row (default text)"
    )
    if strict:
        text = "stop at a document that cannot be read instead of naming it and going on"
        parser.add_argument("--strict", action="store_true", help=text)
    else:
        invalid = parser.add_mutually_exclusive_group()
        text = "stop at what is not valid text (the default)"
        invalid.add_argument("--strict", action="store_true", help=text)
        text = "leave out what is not valid text, and say so"
        invalid.add_argument("--skip-invalid", action="store_true", help=text)
    limit = f"longest document, once unpacked (default {DOCUMENT_LIMIT_MIB})"
    parser.add_argument("--document-limit-mib", type=int, default=DOCUMENT_LIMIT_MIB, help=limit)


def add_shard(parser: CommandParser) -> None:
    """Add what shares the work out over an array of jobs."""
    text = "do the I-th part of N, from 1/N on; merge/N makes OUT when all parts are done"
    parser.add_argument("--shard", metavar="I/N", help=text)


def workers_argument(text: str) -> int | str:
    """Take a number of processes, or a Ray cluster."""
    if text == "ray" or text.startswith("ray://"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{one_line(text)!r} is no number; give one, ray, or ray://HOST:PORT"
        ) from None


def reading_options(options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Return what `add_reading` and `add_shard` were given, as arguments of a public function."""
    names = ("text_column", "document_limit_mib", "shard", *more)
    return {name: getattr(options, name) for name in names}


def _corpus_argument(text: str) -> str:
    return text if is_remote(text) else str(path_argument(text))


def name_left_out(reason: str) -> None:
    """Name a document that is left out."""
    sys.stderr.write(f"left out: {one_line(reason)}\n")
