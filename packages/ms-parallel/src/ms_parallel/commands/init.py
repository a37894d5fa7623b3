"""`ms-parallel init`: write a run file to start from."""

from argparse import ArgumentParser, Namespace

from ms_parallel.entry import file_argument

HELP = "write a run file with every key, its default and its meaning"
EXAMPLE = "ms-parallel init --out RUN.toml"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--out",
        type=file_argument,
        metavar="RUN.toml",
        help="new file to write (default: print it)",
    )


def run(options: Namespace) -> int:
    """Print the template, or write it to a new file."""
    from ms_parallel.run_template import template
    from ms_parallel.settings.template import write_template

    if write_template(template(), options.out):
        print(f"wrote {options.out}; fill in dataset, then: ms-parallel train {options.out}")
    return 0
