"""`ms-parallel init`: write a run file to begin from."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

HELP = "write a run file with every key, its default and its meaning"
EXAMPLE = "ms-parallel init --out RUN.toml"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("--out", metavar="RUN.toml", help="a new file; otherwise it is printed")


def run(options: Namespace) -> int:
    """Print the template, or write it to a new file."""
    from ms_parallel.errors import ConfigError
    from ms_parallel.files.durable import write_file
    from ms_parallel.run_template import template

    if options.out is None:
        print(template(), end="")
        return 0
    if os.path.lexists(options.out):
        raise ConfigError(f"{options.out} exists; choose another name, or delete it")
    write_file(Path(options.out), template().encode())
    print(f"wrote {options.out}; fill in dataset, then: ms-parallel train {options.out}")
    return 0
