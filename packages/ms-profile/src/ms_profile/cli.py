"""The command `ms-profile`: run one subcommand, turn errors into one line and an exit code."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from ms_profile.errors import ProfileError

__all__ = ["COMMANDS", "main"]

COMMANDS: Final = ("run", "report", "compare", "logs", "link")
"""In the order of the help; each is a module of `ms_profile.commands`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 bad input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser(given).parse_args(given)
        return int(options.execute(options))
    except ProfileError as error:
        print(f"ms-profile: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(f"ms-profile: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ms-profile",
        description="Where the time goes, on every rank, and what to do about it.",
        epilog="example: ms-profile run --train-script train.py --output-dir ./profile_results",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    asked = [name for name in given[:1] if name in COMMANDS]
    for name in asked or COMMANDS:
        module = importlib.import_module(f"ms_profile.commands.{name}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"example: {module.EXAMPLE}",
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser
