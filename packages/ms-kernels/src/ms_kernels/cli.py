"""Command line of `ms-kernels`: subcommands and their arguments."""

import argparse
from collections.abc import Callable, Sequence

from ms_kernels import __version__
from ms_kernels.aot.targets import TARGETS
from ms_kernels.aot.workers import cores
from ms_kernels.entry import CommandParser, file_argument, folder_argument, perform


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 0 on success, 1 failed check, 2 bad input, 130 Ctrl-C."""
    parser = _parser()
    # With subcommands, argparse does not accept positional arguments after options.
    options, extra = parser.parse_known_args(arguments)
    if any(argument.startswith("-") for argument in extra) or (extra and "details" not in options):
        parser.error(f"not understood: {' '.join(extra)}")
    if extra:
        options.details += extra
    return perform("ms-kernels", lambda: _command(options.run)(options))


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    """Import a command lazily, because it imports torch, which --help and --version do not need."""
    from ms_kernels.torch_import import without_numpy_warning

    with without_numpy_warning():
        from ms_kernels import commands
    command: Callable[[argparse.Namespace], int] = getattr(commands, name)
    return command


def _parser() -> CommandParser:
    parser = CommandParser(
        "ms-kernels",
        version=__version__,
        description="Operators, their backends, and the proof that they agree.",
        example="ms-kernels explain attention --dtype bfloat16 Sq=1 Sk=4096",
    )
    commands = parser.add_subparsers(
        required=True, metavar="list | explain | check | bench | build", title="commands"
    )
    for name, run, add, text, example in _COMMANDS:
        command = commands.add_parser(name, help=text, example=example)
        command.set_defaults(run=run)
        add(command)
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _add_explain(command: argparse.ArgumentParser) -> None:
    command.add_argument("operator", help="its name; `ms-kernels list` names all")
    command.add_argument(
        "details",
        nargs="*",
        metavar="NAME[=VALUE]",
        help="a size or an option that differs from the usual, or an optional argument",
    )
    command.add_argument("--chip", help="whose tuning table counts, such as sm_90; this machine's")
    _add_device(command)


def _add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument("--operator", action="append", help="only this one; may be repeated")
    _add_device(command)


def _add_bench(command: argparse.ArgumentParser) -> None:
    command.add_argument("--tune", action="store_true", help="make a tuning table of this chip")
    command.add_argument(
        "--out", type=file_argument, help="where to write the table; CHIP.json if left out"
    )
    _add_check(command)


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backend", action="append", help="only this one; may be repeated")
    command.add_argument("--device", default="cpu", help="such as cpu, cuda or npu")
    command.add_argument("--dtype", default="float32", help="such as bfloat16")


def _add_build(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", required=True, help=f"one of: {', '.join(TARGETS)}")
    command.add_argument(
        "--out", type=folder_argument, required=True, help="where the target's folder goes"
    )
    command.add_argument(
        "--only", action="append", default=[], help="kernels or operators whose names begin so"
    )
    command.add_argument(
        "--jobs", type=int, default=cores(), help="processes to compile in; one a core if left out"
    )


_COMMANDS: tuple[tuple[str, str, Callable[[argparse.ArgumentParser], None], str, str], ...] = (
    (
        "list",
        "list_operators",
        lambda command: None,
        "show every operator and what implements it",
        "ms-kernels list --json",
    ),
    (
        "explain",
        "explain",
        _add_explain,
        "show which backend a call gets, why, and the least work it must do",
        "ms-kernels explain attention Sq=1 Sk=4096 window=1024 documents",
    ),
    (
        "check",
        "check",
        _add_check,
        "compare backends with the truth in float64, forward and backward",
        "ms-kernels check --operator attention --dtype bfloat16",
    ),
    (
        "bench",
        "bench",
        _add_bench,
        "time every backend on this machine, or make its tuning table",
        "ms-kernels bench --tune --device cuda --out sm_90.json",
    ),
    (
        "build",
        "build",
        _add_build,
        "make the operator library of a chip that need not be here",
        "ms-kernels build --target sm_90 --out lib/",
    ),
)
"""Commands: name, name of the function, function that adds the arguments, help, example."""
