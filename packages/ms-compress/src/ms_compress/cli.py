"""The command `ms-compress`, also `python -m ms_compress`: a thin layer over public functions."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from ms_compress import __version__
from ms_compress.commands import COMMANDS, Command
from ms_compress.entry import (
    CommandParser,
    exit_code,
    file_argument,
    folder_argument,
    path_argument,
    perform,
)
from ms_compress.errors import ConfigError
from ms_compress.files.model_name import missing_dataset, missing_model
from ms_compress.interruption import end_with_launcher, mark_finished
from ms_compress.options import QuantizeRun
from ms_compress.run.outcome import Outcome
from ms_compress.settings.run_file import add_run_file, build, override, read_settings
from ms_compress.settings.template import help_text, write_template

PROG = "ms-compress"
ARGUMENT_TYPES = {
    "scheme": str,
    "method": str,
    "schemes": str,
    "methods": str,
    "output_dir": folder_argument,
    "dataset": path_argument,
}
FLAGS = {name: f"--{name}" for name in ARGUMENT_TYPES} | {"output_dir": "--out"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 (done), 1 (failed), 2 (bad input) or 130 (interrupted)."""
    options = _parser().parse_args(arguments)
    end_with_launcher()  # do not outlive torchrun
    return perform(PROG, lambda: int(options.handler(options)), report=_report)


def _report(error: BaseException) -> int | None:
    """Return the exit code without a message on all ranks but the first; None: print the error."""
    return None if _is_first() else exit_code(error)


def _is_first() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def _run(options: argparse.Namespace) -> int:
    command: Command = options.command
    if not command.by_torchrun:
        _check_one_process(command.name)
    if command.arguments and options.run_file.is_dir():
        settings: dict[str, Any] = {"model": str(options.run_file)}
        for text in options.set:
            override(settings, text)
    else:
        settings = read_settings(options.run_file, options.set)
    arguments = {name: getattr(options, name) for name in command.arguments}
    settings |= {name: str(value) for name, value in arguments.items() if value is not None}
    settings |= {flag: True for flag in command.flags if getattr(options, flag)}
    run: Any = build(command.options, settings, where=options.run_file)
    try:
        _check_inputs(run)
    except ConfigError as error:
        raise ConfigError(f"{options.run_file}: {error}") from error
    outcome = command.run(run)
    mark_finished()
    return _write(outcome, as_json=options.json)


def _check_one_process(name: str) -> None:
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1":
        raise ConfigError(f"{name} must run in one process, got {count}; start it without torchrun")


def _export(options: argparse.Namespace) -> int:
    _check_one_process("export")
    run = QuantizeRun(
        model=options.model,
        scheme=options.scheme,
        output_dir=options.out,
        tokenizer=None if options.tokenizer is None else str(options.tokenizer),
        verify=options.verify,
    )
    _check_inputs(run)
    command = next(command for command in COMMANDS if command.name == "quantize")
    return _write(command.run(run), as_json=options.json)


def _check_inputs(run: Any) -> None:
    """Check that the model and the dataset of a command exist."""
    model, dataset = getattr(run, "model", None), getattr(run, "dataset", None)
    if model is not None and (problem := missing_model(str(model))) is not None:
        raise ConfigError(f"model must be a local folder: {problem}")
    expected = "a folder of shards, conversations in JSON Lines, or a JSON list of tokens"
    # Rounding to nearest reads no data, except for calibrated inputs.
    unread = getattr(run, "method", None) == "rtn" and not run.needs_dataset
    if (
        dataset is not None
        and not unread
        and (problem := missing_dataset(str(dataset), expected)) is not None
    ):
        raise ConfigError(f"dataset must exist: {problem}")


def _write(outcome: Outcome, *, as_json: bool) -> int:
    if not _is_first():
        return 0
    if as_json:
        sys.stdout.write(msgspec.json.encode(outcome.facts).decode() + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in outcome.lines))
    return 0


def _init(options: argparse.Namespace) -> int:
    command = next(command for command in COMMANDS if command.name == options.name)
    write_template(command.template(), options.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        PROG,
        version=__version__,
        description="Compress language models: quantize, prune, distill, export and evaluate them.",
        example="ms-compress qat RUN.toml tuning.steps=200 scheme=gguf.q4_0",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        _add_command(commands, command)
    _add_export(commands)
    _add_import(commands)
    init = commands.add_parser(
        "init",
        help="write a run file for a command, with a description of every key",
        description="Write a run file for a command, with a description of every key.",
        example="ms-compress init qat --out RUN.toml",
    )
    init.add_argument("name", choices=[command.name for command in COMMANDS], metavar="COMMAND")
    init.add_argument(
        "--out", type=file_argument, metavar="RUN.toml", help="output file; default: stdout"
    )
    init.set_defaults(handler=_init)
    return parser


def _add_command(commands: Any, command: Command) -> None:
    parser = commands.add_parser(
        command.name,
        help=command.help,
        description=f"{command.help[0].upper()}{command.help[1:]}.",
        epilog=f"{help_text(command.groups())}\n\nexample: {command.example}",
    )
    add_run_file(parser)
    for name in command.arguments:
        parser.add_argument(
            FLAGS[name],
            dest=name,
            type=ARGUMENT_TYPES[name],
            metavar=name.upper(),
            help=f"the same as {name}=...; the file may then be a model folder",
        )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    for flag in command.flags:
        parser.add_argument(f"--{flag}", action="store_true", help=f"the same as {flag}=true")
    parser.set_defaults(command=command, handler=_run)


def _import(options: argparse.Namespace) -> int:
    from ms_compress.commands.import_gguf import run

    _check_one_process("import")
    return _write(run(options.file, options.out, options.dtype), as_json=options.json)


def _add_import(commands: Any) -> None:
    parser = commands.add_parser(
        "import",
        help="convert a GGUF file to a Hugging Face folder",
        description="Convert a GGUF file to a Hugging Face folder, to train, distill or quantize.",
        example="ms-compress import model.gguf --out runs/base",
    )
    parser.add_argument("file", type=path_argument, metavar="FILE", help="GGUF file")
    parser.add_argument(
        "--out", type=folder_argument, required=True, metavar="DIR", help="new folder"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="dtype of the weights; float32 (the default) has the file's exact values",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=_import)


def _add_export(commands: Any) -> None:
    text = "write a model folder in a runtime's format, rounded to nearest"
    parser = commands.add_parser(
        "export",
        help=text,
        description=f"{text.capitalize()}. `quantize` has more settings.",
        example="ms-compress export runs/train/model --scheme gguf.q8_0 --out deploy/gguf",
    )
    parser.add_argument("model", type=path_argument, metavar="MODEL", help="Hugging Face folder")
    parser.add_argument(
        "--scheme",
        required=True,
        help="storage format: gguf.q4_0, gguf.q8_0, ort.matmulnbits, ct.int4_g32, ...",
    )
    parser.add_argument(
        "--out", type=folder_argument, required=True, metavar="DIR", help="new folder"
    )
    parser.add_argument(
        "--tokenizer",
        type=path_argument,
        metavar="FILE",
        help="tokenizer.json or its folder (default: the model folder's)",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the result in its runtime and fail unless it agrees with the model",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(handler=_export)
