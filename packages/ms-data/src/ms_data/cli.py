"""The command `ms-data`: each subcommand is a skin over one public function."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date

import msgspec

from ms_data import __version__
from ms_data.building.build import build
from ms_data.building.record import omissions
from ms_data.chat.template import ChatTemplate
from ms_data.corpus.reader import DOCUMENT_LIMIT_MIB
from ms_data.disk.inspection import TokenizerFacts, inspect
from ms_data.disk.verification import verify
from ms_data.entry import INTERRUPTED, CommandParser, one_line, perform
from ms_data.errors import DamageError, DataError
from ms_data.progress import showing
from ms_data.tokenization.tokenizer import Tokenizer
from ms_data.tokenization.training import train_tokenizer

__all__ = ["main"]

_CORPUS = (
    "a file or folder of text or of JSON Lines (.jsonl), plain or packed (.gz, .zst); "
    "or stdlib, the running Python's own library sources"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 done, 1 failed or a check did not hold, 2 bad input, 130 after Ctrl-C."""
    return perform("ms-data", lambda: _execute(arguments), report=_report)


def _execute(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _report(error: BaseException) -> int | None:
    """Writes the line of an error that has notes, or is the system's; leaves others."""
    if isinstance(error, DataError):
        _complain(str(error), error)
        return 1 if isinstance(error, DamageError) else 2
    if isinstance(error, KeyboardInterrupt):
        _complain("interrupted", error)
        return INTERRUPTED
    if isinstance(error, OSError):
        _complain(f"cannot go on: {error}; free some space or choose another place", error)
        _forget_output()
        return 2
    return None


def _forget_output() -> None:
    """What could not be printed is dropped, or Python would try it again when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _complain(text: str, error: BaseException) -> None:
    line = one_line("; ".join((text, *getattr(error, "__notes__", ()))))
    print(f"ms-data: {line}", file=sys.stderr)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="ms-data",
        version=__version__,
        description="From raw corpus to token batches.",
        example="ms-data build stdlib --tokenizer tokenizer.json --out shards",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_tokenizer(commands)
    _add_build(commands)
    _add_inspect(commands)
    _add_verify(commands)
    return parser


def _command(
    commands: "argparse._SubParsersAction[CommandParser]", name: str, text: str, line: str
) -> CommandParser:
    return commands.add_parser(name, help=text, description=text, example=line)


def _add_reading(parser: CommandParser) -> None:
    parser.add_argument("corpus", metavar="CORPUS", help=_CORPUS)
    parser.add_argument("--text-key", default="text", help="where a JSON line holds its text")
    parser.add_argument("--skip-invalid", action="store_true", help="leave out what is not text")
    parser.add_argument(
        "--document-limit-mib",
        type=int,
        default=DOCUMENT_LIMIT_MIB,
        help=f"longest document, once unpacked (default {DOCUMENT_LIMIT_MIB})",
    )


def _add_tokenizer(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    parser = _command(
        commands,
        "tokenizer",
        "Learn a byte-level BPE tokenizer from a corpus.",
        "ms-data tokenizer stdlib --vocab-size 8192 --out tokenizer.json",
    )
    _add_reading(parser)
    parser.add_argument("--vocab-size", type=int, default=8192, help="tokens to learn at most")
    parser.add_argument(
        "--out",
        required=True,
        help="the file to write if it ends in .json; else a folder, which transformers'"
        " AutoTokenizer opens too",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.set_defaults(run=_run_tokenizer)


def _add_build(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    parser = _command(
        commands,
        "build",
        "Tokenize a corpus into a folder of checked, compressed shards.",
        "ms-data build stdlib --tokenizer tokenizer.json --out shards --hold-out 0.02",
    )
    _add_reading(parser)
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--out", required=True, help="the folder to write; must not hold anything")
    parser.add_argument("--hold-out", type=float, default=0.0, help="share of documents held out")
    parser.add_argument("--shard-size-mib", type=int, default=64, help="close a shard at this size")
    parser.add_argument("--end-of-text", help="the token that ends a document, by its name")
    parser.add_argument(
        "--chat-template",
        metavar="FOLDER",
        help="build an instruction set (OpenAI, ShareGPT or Alpaca rows in JSON Lines) with the "
        "chat template of this tokenizer's folder, or of a Jinja file",
    )
    parser.add_argument("--pairs", action="store_true", help="the rows are preference pairs")
    parser.add_argument(
        "--today", type=date.fromisoformat, help="the date a template is told, as 2026-01-31"
    )
    parser.add_argument(
        "--allow-special", action="store_true", help="let messages spell special tokens"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=_run_build)


def _add_inspect(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    text = "Say what a folder of shards holds."
    parser = _command(commands, "inspect", text, "ms-data inspect shards --json")
    parser.add_argument("shards", metavar="SHARDS")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    parser.set_defaults(run=_run_inspect)


def _add_verify(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    text = "Check every byte of a folder of shards; exit 1 and name the place where one is wrong."
    parser = _command(commands, "verify", text, "ms-data verify shards")
    parser.add_argument("shards", metavar="SHARDS")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run_verify)


def _run_tokenizer(options: argparse.Namespace) -> int:
    left_out: Counter[str] = Counter()
    with showing("reading") as on_progress:
        tokenizer = train_tokenizer(
            options.corpus,
            vocab_size=options.vocab_size,
            out=options.out,
            text_key=options.text_key,
            skip_invalid=options.skip_invalid,
            document_limit_mib=options.document_limit_mib,
            on_progress=on_progress,
            on_leave_out=lambda kind: left_out.update([kind]),
        )
    facts = TokenizerFacts(
        path=options.out,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        end_of_text_name=tokenizer.end_of_text_name,
        left_out=dict(sorted(left_out.items())),
    )
    if options.json:
        _print_json(facts)
        return 0
    print(f"{facts.path}: {facts.vocabulary_size:,} tokens{omissions(facts.left_out)}")
    return 0


def _run_build(options: argparse.Namespace) -> int:
    template = options.chat_template and ChatTemplate.load(
        options.chat_template, today=options.today
    )
    with showing("tokenizing") as on_progress:
        summary = build(
            options.corpus,
            tokenizer=Tokenizer.load(options.tokenizer, end_of_text=options.end_of_text),
            out=options.out,
            hold_out=options.hold_out,
            shard_size_mib=options.shard_size_mib,
            text_key=options.text_key,
            skip_invalid=options.skip_invalid,
            document_limit_mib=options.document_limit_mib,
            chat=template,
            pairs=options.pairs,
            allow_special=options.allow_special,
            on_progress=on_progress,
        )
    if options.json:
        _print_json(summary)
        return 0
    splits = ", ".join(f"{name} {tokens:,}" for name, tokens in summary.splits.items())
    done = "built before, nothing to do: " if summary.built_before else ""
    print(
        f"{summary.folder}: {done}{summary.documents:,} documents{summary.omissions}, "
        f"{summary.tokens:,} tokens ({splits}) in {_shards(summary.shards)} of "
        f"{summary.size_bytes / 1e6:.1f} MB"
    )
    return 0


def _run_inspect(options: argparse.Namespace) -> int:
    facts = inspect(options.shards)
    if options.json:
        _print_json(facts)
        return 0
    print(
        f"{facts.folder}: vocabulary {facts.vocabulary_size:,}, tokens stored as "
        f"{facts.token_type}, fingerprint {facts.fingerprint}"
    )
    for name, split in facts.splits.items():
        print(
            f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, "
            f"{_shards(split.shards)} of {split.size_bytes / 1e6:.1f} MB "
            f"({split.size_bytes / split.tokens:.2f} bytes a token)"
        )
    return 0


def _run_verify(options: argparse.Namespace) -> int:
    with showing("checking") as on_progress:
        report = verify(options.shards, on_progress=on_progress)
    if options.json:
        _print_json(report)
        return 0 if report.ok else 1
    for fault in report.faults:
        print(fault)
    if report.ok:
        print(
            f"{options.shards}: all bytes of {_shards(report.shards)} "
            f"({report.frames:,} frames) are as they were written"
        )
        return 0
    count = len(report.faults)
    print(f"{options.shards}: {count} {'fault' if count == 1 else 'faults'}; build it again")
    return 1


def _shards(count: int) -> str:
    return f"{count:,} shard{'' if count == 1 else 's'}"


def _print_json(value: msgspec.Struct) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
