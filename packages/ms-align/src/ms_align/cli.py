"""Command-line entry point of `python -m ms_align` and `ms-align`."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ms_align import __version__
from ms_align.commands.command import COMMANDS, Command
from ms_align.commands.early import check_early
from ms_align.entry import DONE, CommandParser, exit_code, file_argument, perform
from ms_align.interruption import end_with_launcher, mark_finished
from ms_align.settings.run_file import add_run_file, read_settings
from ms_align.settings.template import help_text, write_template

PROG = "ms-align"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 (done), 1 (failed), 2 (bad input) or 130 (after Ctrl-C)."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(with_epilog=bool({"-h", "--help"} & set(argv))).parse_args(argv)
    # Do not outlive torchrun, which would leave the ports and devices in use.
    end_with_launcher()
    run: Callable[[argparse.Namespace], int] = options.handler
    return perform(PROG, lambda: run(options), report=_report)


def _report(error: BaseException) -> int | None:
    """Report an error once for all processes of a run; None: this process reports it itself."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        from ms_parallel import report_error
    except ImportError:  # without ms-parallel every rank fails with the same error
        code = exit_code(error)
        return None if os.environ.get("RANK", "0") == "0" else code
    return report_error(error, command=PROG)


def _parser(*, with_epilog: bool) -> argparse.ArgumentParser:
    parser = CommandParser(
        PROG,
        version=__version__,
        description="Align language models: fine-tune, train reward models, optimize rewards.",
        example="ms-align ppo RUN.toml steps=200 kl_coeff=0.1",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = commands.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=_epilog(command) if with_epilog else None,
        )
        add_run_file(subparser)
        subparser.add_argument(
            "--json",
            action="store_true",
            help="print a JSON summary of the run; everything else goes to standard error",
        )
        subparser.set_defaults(handler=_run, command=command)
    _add_init(commands)
    return parser


def _add_init(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    init = commands.add_parser(
        "init",
        help="write a template run file",
        description="Write a run file with every key of a command, its default and description.",
        example="ms-align init ppo --out RUN.toml",
    )
    by_name = {command.name: command for command in COMMANDS}
    init.add_argument("name", metavar="COMMAND", choices=sorted(by_name), help=", ".join(by_name))
    init.add_argument(
        "--out",
        type=file_argument,
        metavar="RUN.toml",
        help="file to create; standard output by default",
    )
    init.set_defaults(handler=lambda options: _init(by_name[options.name], options.out))


def _epilog(command: Command) -> str:
    return f"{help_text(command.groups())}\n\nexample: {command.example}"


def _init(command: Command, out: Path | None) -> int:
    if write_template(command.template(), out):
        print(f"{out}: fill in the paths, then: ms-align {command.name} {out}")
    return DONE


def _run(options: argparse.Namespace) -> int:
    where = str(options.run_file)
    settings = read_settings(where, options.set)
    check_early(options.command, settings, where)
    perform = options.command.perform
    # With --json, stdout is for the summary alone.
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        summary = perform(settings, where)
    if options.json and os.environ.get("RANK", "0") == "0":
        print(json.dumps(summary, indent=2))
    if summary["code"] == DONE:
        mark_finished()
    return int(summary["code"])
