"""The command: `python -m ms_compress` and `ms-compress`, a skin over public classes."""

import argparse
import os
import sys
from collections.abc import Sequence

from ms_compress.commands import COMMANDS
from ms_compress.errors import CompressError
from ms_compress.run_file import read_settings

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 (done), 1 (failed) or 2 (bad input)."""
    options = _parser().parse_args(arguments)
    try:
        settings = read_settings(options.run_file, options.set)
        settings |= {flag: True for flag in options.command.flags if getattr(options, flag)}
        return int(options.command.run(settings, options.run_file))
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # whatever is not told in a line keeps its traceback
        if not isinstance(error, CompressError) and not _is_of_a_sibling(error):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ms-compress",
        description="Compress language models: quantise, prune, distil, export and measure them.",
        epilog="example: ms-compress qat RUN.toml --set steps=200 --set scheme=gguf.q4_0",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        one = commands.add_parser(
            command.name, help=command.help, epilog=f"example: {command.example}"
        )
        one.add_argument("run_file", metavar="RUN.toml", help="settings of the run, in TOML")
        one.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change one setting; table.key=value reaches into a table",
        )
        for flag in command.flags:
            one.add_argument(
                f"--{flag}", action="store_true", help=f"the same as --set {flag}=true"
            )
        one.set_defaults(command=command)
    return parser


def _is_of_a_sibling(error: Exception) -> bool:
    """An error that a sibling raised on purpose; without importing what a run need not have."""
    bases = (("ms_data", "DataError"), ("ms_parallel", "ParallelError"))
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in bases]
    return any(kind is not None and isinstance(error, kind) for kind in kinds)
