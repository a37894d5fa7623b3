"""Command line of `ms-kernels`: subcommands and their arguments."""

import argparse
from collections.abc import Callable, Sequence

from ms_kernels import __version__
from ms_kernels.aot.targets import TARGETS
from ms_kernels.aot.workers import cores
from ms_kernels.entry import CommandParser, file_argument, folder_argument, perform
from ms_kernels.used_settings import UsedIf


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; exit code 0 on success, 1 failed check, 2 bad input, 130 Ctrl-C."""
    parser = _parser()
    # With subcommands, argparse does not accept positional arguments after options.
    options, extra = parser.parse_known_args(arguments)
    if extra and "details" not in options:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
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
        description="Inspect, check, time and build operators and their backends.",
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
    command.add_argument("operator", help="name of the operator, from `ms-kernels list`")
    command.add_argument(
        "details",
        nargs="*",
        metavar="NAME[=VALUE]",
        help="size, option or optional argument of the call",
    )
    command.add_argument(
        "--chip", help="chip whose tuning table is used, such as sm_90; default: this machine"
    )
    _add_device(command)


def _add_check(command: argparse.ArgumentParser) -> None:
    command.add_argument("--operator", action="append", help="use only this one; may be repeated")
    _add_device(command)


def _add_bench(command: CommandParser) -> None:
    command.used_if = (UsedIf("out", "with --tune", lambda options: options.tune),)
    command.add_argument(
        "--tune", action="store_true", help="generate the tuning table of this chip"
    )
    command.add_argument(
        "--out", type=file_argument, help="output file of the table; default: CHIP.json"
    )
    _add_check(command)


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument("--backend", action="append", help="use only this one; may be repeated")
    command.add_argument("--device", default="cpu", help="device, such as cpu, cuda or npu")
    command.add_argument("--dtype", default="float32", help="dtype, such as bfloat16")


def _add_build(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", required=True, help=f"chip: {', '.join(TARGETS)}")
    command.add_argument(
        "--out",
        type=folder_argument,
        required=True,
        help="output folder, in which TARGET/ is created",
    )
    command.add_argument(
        "--only",
        action="append",
        default=[],
        help="prefix of kernels or operators to build; may be repeated",
    )
    command.add_argument(
        "--jobs",
        type=int,
        default=cores(),
        help="number of compiler processes; default: one per core",
    )


_COMMANDS: tuple[tuple[str, str, Callable[[CommandParser], None], str, str], ...] = (
    (
        "list",
        "list_operators",
        lambda command: None,
        "list all operators and their implementations",
        "ms-kernels list --json",
    ),
    (
        "explain",
        "explain",
        _add_explain,
        "show the backend chosen for a call, the reasons, and its minimum work",
        "ms-kernels explain attention Sq=1 Sk=4096 window=1024 documents",
    ),
    (
        "check",
        "check",
        _add_check,
        "compare backends with the float64 reference, forward and backward",
        "ms-kernels check --operator attention --dtype bfloat16",
    ),
    (
        "bench",
        "bench",
        _add_bench,
        "time all backends on this machine, or generate its tuning table",
        "ms-kernels bench --tune --device cuda --out sm_90.json",
    ),
    (
        "build",
        "build",
        _add_build,
        "build the operator library of a chip, which need not be installed",
        "ms-kernels build --target sm_90 --out lib/",
    ),
)
"""Commands: name, name of the function, function that adds the arguments, help, example."""
