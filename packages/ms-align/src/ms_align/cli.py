"""The command: `python -m ms_align` and `ms-align`, a skin over public classes."""

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
from ms_align.interruption import end_with_launcher
from ms_align.settings.run_file import add_run_file, read_settings
from ms_align.settings.template import help_text, write_template

PROG = "ms-align"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 (done), 1 (failed), 2 (bad input) or 130 (after Ctrl-C)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(explains=bool({"-h", "--help"} & set(given))).parse_args(given)
    end_with_launcher()
    act: Callable[[argparse.Namespace], int] = options.act
    return perform(PROG, lambda: act(options), report=_report)


def _report(error: BaseException) -> int | None:
    """Report an error once for all processes of a run; a single process reports it itself."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    try:
        from ms_parallel import report_error
    except ImportError:  # then nothing runs on several processes, and all of them fail alike
        code = exit_code(error)
        return None if os.environ.get("RANK", "0") == "0" else code
    return report_error(error, command=PROG)


def _parser(*, explains: bool) -> argparse.ArgumentParser:
    parser = CommandParser(
        PROG,
        version=__version__,
        description="Align language models: tune on instructions, learn rewards, optimise them.",
        example="ms-align ppo RUN.toml --set steps=200 --set kl_coeff=0.1",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        one = commands.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=_epilog(command) if explains else None,
        )
        add_run_file(one)
        one.add_argument(
            "--json",
            action="store_true",
            help="print what the run came to as one JSON document; all else goes to standard error",
        )
        one.set_defaults(act=_run, command=command)
    _add_init(commands)
    return parser


def _add_init(commands: "argparse._SubParsersAction[CommandParser]") -> None:
    init = commands.add_parser(
        "init",
        help="write a run file to begin with",
        description="Write a run file that holds every key of a command, its default and meaning.",
        example="ms-align init ppo --out RUN.toml",
    )
    named = {command.name: command for command in COMMANDS}
    init.add_argument("name", metavar="COMMAND", choices=sorted(named), help=", ".join(named))
    init.add_argument(
        "--out",
        type=file_argument,
        metavar="RUN.toml",
        help="a new file; standard output by default",
    )
    init.set_defaults(act=lambda options: _init(named[options.name], options.out))


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
    run = options.command.perform
    if not options.json:
        return int(run(settings, where)["code"])
    with contextlib.redirect_stdout(sys.stderr):
        facts = run(settings, where)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(facts, indent=2))
    return int(facts["code"])
