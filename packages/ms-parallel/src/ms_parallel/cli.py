"""The command line of ms-parallel; each command calls a public function.

torch is imported only when a command needs it.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from ms_parallel import commands
from ms_parallel.entry import BAD_INPUT, CommandParser, perform
from ms_parallel.version import __version__

DOCTOR = (
    "doctor is now a command of ms-profile; pip install 'ms-profile[torch]' and run `ms-profile"
    " doctor`, or under torchrun `-m ms_profile doctor`"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 (done), 1 (failed), 2 (bad input) or 130 (Ctrl-C)."""
    words = sys.argv[1:] if arguments is None else arguments
    if [*words[:1]] == ["doctor"]:
        sys.stderr.write(f"ms-parallel: {DOCTOR}\n")
        return BAD_INPUT
    options = _parser(words).parse_args(words)
    return perform("ms-parallel", lambda: int(options.run(options)), report=_report)


def _report(error: BaseException) -> int | None:
    """Report an error once for all processes of a run; None: `perform` reports it."""
    if "WORLD_SIZE" not in os.environ and "ms_parallel.cluster.error_report" not in sys.modules:
        return None
    from ms_parallel.cluster.error_report import report_error

    return report_error(error)


def _parser(words: Sequence[str]) -> CommandParser:
    parser = CommandParser(
        "ms-parallel",
        version=__version__,
        description="Train language models over many processes.",
        example="torchrun --standalone --nproc-per-node 2 -m ms_parallel train RUN.toml",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for file in iter_modules(commands.__path__):
        command = import_module(f"{commands.__name__}.{file.name}")
        subparser = subparsers.add_parser(file.name, help=command.HELP, example=command.EXAMPLE)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
        if subparser.get_default("has_run_file") and {"-h", "--help"} & set(words):
            from ms_parallel.run_template import key_groups
            from ms_parallel.settings.template import help_text

            subparser.epilog = f"{help_text(key_groups())}\n\n{subparser.epilog}"
    return parser
