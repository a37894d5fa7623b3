"""The command `ms-profile`: run one subcommand, turn errors into one line and an exit code."""

import importlib
import sys
from collections.abc import Sequence
from typing import Final

from ms_profile.entry import BAD_INPUT, FAILED, CommandParser, one_line, perform
from ms_profile.errors import nearest_name
from ms_profile.version import __version__

PROG: Final = "ms-profile"
COMMANDS: Final = ("run", "report", "compare", "logs", "track", "link")
"""In the order of the help; each is a module of `ms_profile.commands`."""
MEANT: Final = {
    "run": ("profile", "capture", "record", "start", "trace", "train"),
    "report": ("analyse", "analyze", "html", "open", "ring", "show", "summary", "view"),
    "compare": ("diff", "regression"),
    "logs": ("events", "log", "tail"),
    "track": ("mlflow", "sync", "tensorboard", "upload", "wandb"),
    "link": ("bandwidth", "latency", "ping"),
}
"""Words that stand for a command elsewhere."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 done, 1 failed, 2 bad input, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return perform(PROG, lambda: _execute(given), report=_report_system)


def _execute(given: Sequence[str]) -> int:
    if given and not given[0].startswith("-") and given[0] not in COMMANDS:
        sys.stderr.write(f"{PROG}: {_unknown(given[0])}\n")
        return BAD_INPUT
    options = _parser(given).parse_args(given)
    return int(options.execute(options))


def _report_system(error: BaseException) -> int | None:
    """Print what the system reports of a file that cannot be written, such as a full disk."""
    if not isinstance(error, OSError):
        return None
    sys.stderr.write(f"{PROG}: {one_line(str(error))}\n")
    return FAILED


def _unknown(word: str) -> str:
    """Return the message for a word that is no command, with the one that was probably meant."""
    meant = {each: name for name, words in MEANT.items() for each in (name, *words)}
    hint = nearest_name(word.lower(), meant)
    shown = one_line(word)[:60]
    if hint is None:
        return f"there is no command {shown!r}; the commands are {', '.join(COMMANDS)}"
    command = meant[hint]
    return (
        f"there is no command {shown!r}; did you mean {command!r}? See {PROG} {command} --help; "
        f"the commands are {', '.join(COMMANDS)}"
    )


def _parser(given: Sequence[str]) -> CommandParser:
    parser = CommandParser(
        PROG,
        version=__version__,
        description="Where the time goes, on every rank, and what to do about it.",
        example="ms-profile run --train-script train.py --output-dir ./profile_results",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = [name for name in given[:1] if name in COMMANDS]
    for name in asked or COMMANDS:
        module = importlib.import_module(f"ms_profile.commands.{name}")
        command = commands.add_parser(
            name, help=module.HELP, description=module.HELP, example=module.EXAMPLE
        )
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser
