"""The `ms-profile` command: dispatch to a subcommand; errors become one line and an exit code."""

import importlib
import sys
from collections.abc import Sequence
from typing import Final

from ms_profile.entry import BAD_INPUT, FAILED, CommandParser, one_line, perform
from ms_profile.errors import nearest_name
from ms_profile.version import __version__

PROG: Final = "ms-profile"
COMMANDS: Final = ("run", "report", "memory", "compare", "logs", "serve", "track", "link", "doctor")
"""Subcommands in the order of the help text; each is a module in `ms_profile.commands`."""
SYNONYMS: Final = {
    "run": ("profile", "capture", "record", "start", "trace", "train"),
    "report": ("analyse", "analyze", "html", "open", "ring", "show", "summary", "view"),
    "memory": ("allocations", "oom", "snapshot"),
    "compare": ("diff", "regression"),
    "logs": ("events", "log", "tail"),
    "serve": ("dashboard", "live", "watch", "web"),
    "track": ("mlflow", "sync", "tensorboard", "upload", "wandb"),
    "link": ("bandwidth", "latency", "ping"),
    "doctor": ("check", "diagnose", "examine", "health", "measure"),
}
"""What users of other tools may type instead of each command, for the "did you mean" hint."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        0 on success, 1 on failure, 2 on bad input, 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    return perform(PROG, lambda: _execute(argv), report=_report_os_error)


def _execute(argv: Sequence[str]) -> int:
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        sys.stderr.write(f"{PROG}: {_unknown(argv[0])}\n")
        return BAD_INPUT
    options = _parser(argv).parse_args(argv)
    return int(options.execute(options))


def _report_os_error(error: BaseException) -> int | None:
    """Print an operating system error, such as a full disk, and return the exit code for it."""
    if not isinstance(error, OSError):
        return None
    sys.stderr.write(f"{PROG}: {one_line(str(error))}\n")
    return FAILED


def _unknown(word: str) -> str:
    """Return the error message for an unknown command, with the closest known one."""
    command_of = {alias: name for name, words in SYNONYMS.items() for alias in (name, *words)}
    hint = nearest_name(word.lower(), command_of)
    shown = one_line(word)[:60]
    if hint is None:
        return f"unknown command {shown!r}; the commands are {', '.join(COMMANDS)}"
    command = command_of[hint]
    return (
        f"unknown command {shown!r}; did you mean {command!r}? See {PROG} {command} --help; "
        f"the commands are {', '.join(COMMANDS)}"
    )


def _parser(argv: Sequence[str]) -> CommandParser:
    parser = CommandParser(
        PROG,
        version=__version__,
        description="Find out why distributed training is slow, on every rank, and how to fix it.",
        example="ms-profile run --train-script train.py --output-dir ./profile_results",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    # Import only the module of the requested command: `logs --help` must not import torch.
    selected = [name for name in argv[:1] if name in COMMANDS]
    for name in selected or COMMANDS:
        module = importlib.import_module(f"ms_profile.commands.{name}")
        command = commands.add_parser(
            name, help=module.HELP, description=module.HELP, example=module.EXAMPLE
        )
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser
