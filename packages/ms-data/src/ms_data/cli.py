"""The `ms-data` command: every subcommand is a thin wrapper over one public function."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path

import msgspec

from ms_data import __version__
from ms_data.building.build import build
from ms_data.building.output import Summary
from ms_data.chat.template import ChatTemplate
from ms_data.commands.arguments import (
    add_command,
    add_reading_arguments,
    add_shard_argument,
    reading_options,
    report_skipped,
)
from ms_data.commands.clean import add_clean, add_init, add_stats
from ms_data.commands.dedup import add_dedup
from ms_data.commands.exchange import add_export, add_import
from ms_data.corpus.file_kinds import omissions
from ms_data.disk.inspection import SplitInfo, inspect
from ms_data.disk.verification import Report, verify
from ms_data.entry import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    CommandParser,
    folder_argument,
    one_line,
    path_argument,
    perform,
)
from ms_data.errors import DamageError, DataError
from ms_data.media.processor import Processor
from ms_data.progress import show_progress
from ms_data.tokenization.tokenizer import Tokenizer
from ms_data.tokenization.training import train_tokenizer
from ms_data.used_settings import UsedIf

_TOKENIZER = (
    "folder of a model or tokenizer, whose other files name its special tokens, or a "
    "tokenizer.json alone"
)


class _TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Result of training a tokenizer."""

    path: str
    vocabulary_size: int
    end_of_text: int
    """ID of the token that ends a document."""
    end_of_text_name: str
    left_out: dict[str, int]
    """Number of skipped non-text files, by file type."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: done; 1: failed, or a check found damage; 2: bad input; 130: interrupted by Ctrl-C.
    """
    return perform("ms-data", lambda: _execute(arguments), report=_report)


def _execute(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    # Every subcommand returns a record for --json, and the text for a terminal.
    result, text = options.run(options)
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2).decode()
    if options.json or text:
        print(encoded if options.json else text)
    return FAILED if isinstance(result, Report) and not result.ok else DONE


def _report(error: BaseException) -> int | None:
    """Print errors that have notes or come from the system; `perform` handles the others."""
    if isinstance(error, DataError):
        _complain(str(error), error)
        return FAILED if isinstance(error, DamageError) else BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        _complain("interrupted", error)
        return INTERRUPTED
    if isinstance(error, OSError):
        _complain(f"{error}; free some disk space or write to another disk", error)
        _forget_output()
        return BAD_INPUT
    return None


def _forget_output() -> None:
    """Discard buffered output that could not be printed; Python would try again at exit."""
    null_fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_fd, sys.stdout.fileno())
    os.close(null_fd)


def _complain(text: str, error: BaseException) -> None:
    line = one_line("; ".join((text, *getattr(error, "__notes__", ()))))
    print(f"ms-data: {line}", file=sys.stderr)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ms-data",
        version=__version__,
        description="Prepare training data: from a raw corpus to token batches.",
        example="ms-data build stdlib --tokenizer tokenizer.json --out shards",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_tokenizer(commands)
    _add_build(commands)
    for run, name, text in (
        (_run_inspect, "inspect", "Show the contents of a folder of shards."),
        (
            _run_verify,
            "verify",
            "Check every byte of a folder of shards; list damaged parts and exit with 1.",
        ),
    ):
        line = f"ms-data {name} shards"
        add_command(commands, run, name, text, line).add_argument(
            "shards", type=path_argument, metavar="SHARDS"
        )
    add_clean(commands)
    add_dedup(commands)
    add_import(commands)
    add_export(commands)
    add_stats(commands)
    add_init(commands)
    return parser


def _add_tokenizer(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    parser = add_command(
        commands,
        _run_tokenizer,
        "tokenizer",
        "Learn a byte-level BPE tokenizer from a corpus.",
        "ms-data tokenizer stdlib --vocab-size 8192 --out tokenizer.json",
    )
    add_reading_arguments(parser)
    parser.add_argument("--vocab-size", type=int, default=8192, help="largest vocabulary")
    parser.add_argument(
        "--out",
        type=path_argument,
        required=True,
        help="a .json file to write, or a folder that transformers' AutoTokenizer can load",
    )


def _add_build(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    parser = add_command(
        commands,
        _run_build,
        "build",
        "Tokenize a corpus into a folder of checked, compressed shards.",
        "ms-data build stdlib --tokenizer tokenizer.json --out shards --held-out-fraction 0.02",
    )
    parser.used_if = (
        UsedIf(
            "today allow_special processor",
            "with --chat or --chat-template",
            lambda options: options.chat or options.chat_template,
        ),
        UsedIf("media_folder", "with --processor", lambda options: options.processor),
        UsedIf(
            "text_column begin_of_text no_begin_of_text",
            "without --chat and --chat-template",
            lambda options: not (options.chat or options.chat_template),
        ),
    )
    add_reading_arguments(parser)
    parser.add_argument("--tokenizer", type=path_argument, required=True, help=_TOKENIZER)
    parser.add_argument(
        "--out",
        type=folder_argument,
        required=True,
        help="output folder; must be empty or not exist",
    )
    parser.add_argument(
        "--held-out-fraction", type=float, default=0.0, help="fraction of documents held out"
    )
    parser.add_argument("--shard-size-mib", type=int, default=64, help="close a shard at this size")
    add_shard_argument(parser)
    text = "tokenize on a Ray cluster: ray or ray://HOST:PORT (default: all local cores)"
    parser.add_argument("--workers", metavar="RAY", help=text)
    text = "name of the token that ends a document (default: eos_token of the tokenizer's folder)"
    parser.add_argument("--end-of-text", metavar="NAME", help=text)
    begin = parser.add_mutually_exclusive_group()
    text = (
        "name of the token that starts a text document (default: the token that tokenizer.json "
        "adds, as Gemma's and Llama's do)"
    )
    begin.add_argument("--begin-of-text", metavar="NAME", help=text)
    text = "add no token at the start of documents, even if tokenizer.json does"
    begin.add_argument("--no-begin-of-text", action="store_true", help=text)
    templates = parser.add_mutually_exclusive_group()
    templates.add_argument(
        "--chat",
        action="store_true",
        help="build an instruction dataset (OpenAI, ShareGPT or Alpaca rows in JSON, CSV or "
        "Parquet) with the chat template in the folder of --tokenizer",
    )
    templates.add_argument(
        "--chat-template",
        type=path_argument,
        metavar="FOLDER",
        help="like --chat, with the chat template of another tokenizer's folder or a Jinja file",
    )
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--pairs", action="store_true", help="the rows are preference pairs")
    rows.add_argument(
        "--unpaired",
        action="store_true",
        help="the rows are responses with a label: prompt, completion, label",
    )
    parser.add_argument(
        "--today", type=date.fromisoformat, help="date for chat templates, such as 2026-01-31"
    )
    parser.add_argument(
        "--allow-special", action="store_true", help="allow special tokens in message text"
    )
    parser.add_argument(
        "--processor",
        type=path_argument,
        metavar="FOLDER",
        help="model folder with the processor for images and audio in messages",
    )
    parser.add_argument(
        "--media-folder",
        type=path_argument,
        metavar="FOLDER",
        help="base folder of image and audio paths (default: the corpus folder, or the folder of "
        "a single corpus file)",
    )


def _run_tokenizer(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    left_out: Counter[str] = Counter()  # skipped files by type
    with show_progress("reading") as on_progress:
        tokenizer = train_tokenizer(
            options.corpus,
            vocab_size=options.vocab_size,
            out=options.out,
            text_column=options.text_column,
            skip_invalid=options.skip_invalid,
            document_limit_mib=options.document_limit_mib,
            on_progress=on_progress,
            on_leave_out=lambda file_type: left_out.update([file_type]),
        )
    result = _TokenizerInfo(
        path=str(options.out),
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_name=tokenizer.end_of_text_name,
        left_out=dict(sorted(left_out.items())),
    )
    return result, f"{result.path}: {result.vocabulary_size:,} tokens{omissions(left_out)}"


def _run_build(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    template = _chat_template(options)
    begin = False if options.no_begin_of_text else options.begin_of_text
    processor = options.processor and Processor.load(
        options.processor, media_folder=options.media_folder
    )
    with show_progress("tokenizing") as on_progress:
        summary = build(
            options.corpus,
            tokenizer=Tokenizer.load(
                options.tokenizer, end_of_text=options.end_of_text, begin_of_text=begin
            ),
            out=options.out,
            held_out_fraction=options.held_out_fraction,
            shard_size_mib=options.shard_size_mib,
            **reading_options(options, "skip_invalid", "workers"),
            chat=template,
            pairs=options.pairs,
            unpaired=options.unpaired,
            allow_special=options.allow_special,
            processor=processor,
            on_progress=on_progress,
            on_skip=report_skipped,
        )
    splits = ", ".join(
        f"{name} {tokens:,} tokens of {_count(summary.split_documents[name], 'document')}"
        for name, tokens in summary.splits.items()
    )
    done = "built before, nothing to do: " if summary.built_before else ""
    # A job of an array writes token batches; only the merge job writes shards.
    shards = f" ({splits}) in {_shards(summary)}" if summary.splits else ""
    for warning in summary.warnings:
        print(f"ms-data: warning: {warning}", file=sys.stderr)
    return summary, (
        f"{summary.folder}: {done}{summary.documents:,} documents{summary.omissions}, "
        f"{summary.tokens:,} tokens{shards}; {summary.contents}encoded {summary.encoder}"
    )


def _chat_template(options: argparse.Namespace) -> ChatTemplate | None:
    """Load the chat template that `--chat` or `--chat-template` names."""
    path: Path | None = options.chat_template
    if options.chat:
        tokenizer: Path = options.tokenizer
        # --chat: the template is next to the tokenizer.
        path = tokenizer if tokenizer.is_dir() else tokenizer.parent
    return None if path is None else ChatTemplate.load(path, today=options.today)


def _run_inspect(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    info = inspect(options.shards)
    head = (
        f"{info.folder}: vocabulary {info.vocabulary_size:,}, tokens stored as {info.token_type}, "
        f"fingerprint {info.fingerprint}"
    )
    lines = [
        f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, {_shards(split)} "
        f"({split.size_bytes / split.tokens:.2f} bytes per token)"
        for name, split in info.splits.items()
    ]
    with suppress(msgspec.ValidationError):  # written by another version
        summary = msgspec.convert(info.build, Summary)
        lines.append(f"  built: {summary.contents}encoded {summary.encoder}{summary.omissions}")
        lines += [f"  warning: {warning}" for warning in summary.warnings]
    return info, "\n".join((head, *lines))


def _run_verify(options: argparse.Namespace) -> tuple[msgspec.Struct, str]:
    with show_progress("checking") as on_progress:
        report = verify(options.shards, on_progress=on_progress)
    if report.ok:
        shards = _count(report.shards, "shard")
        frames = f"{report.frames:,} frames"
        extra_files = f"; not part of the dataset: {', '.join(report.unchecked)}"
        extra_files = extra_files if report.unchecked else ""
        return (
            report,
            f"{options.shards}: all bytes of {shards} ({frames}) are intact{extra_files}",
        )
    faults = _count(len(report.faults), "fault")
    last_line = f"{options.shards}: {faults}; rebuild it"
    return report, "\n".join((*map(str, report.faults), last_line))


def _shards(written: Summary | SplitInfo) -> str:
    return f"{_count(written.shards, 'shard')} of {written.size_bytes / 1e6:.1f} MB"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
