"""What several subcommands share: the run file's arguments, `--json`, and how facts are printed."""

import sys
from argparse import ArgumentParser
from typing import Any

import msgspec

from ms_parallel.entry import path_argument

__all__ = ["GIB", "add_json", "add_run_file", "print_json"]

GIB = 1 << 30


def add_run_file(parser: ArgumentParser) -> None:
    """Take a run file and changes to it; the help names every key."""
    parser.add_argument(
        "run_file",
        type=path_argument,
        metavar="RUN.toml",
        help="settings of the run, in TOML",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting; table.key=value reaches into a table",
    )
    parser.set_defaults(has_run_file=True)


def add_json(parser: ArgumentParser) -> None:
    """Offer facts as one JSON document."""
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def print_json(facts: Any) -> int:
    """Print facts as one JSON document; returns the exit code of success."""
    encoded = msgspec.json.encode(facts, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    return 0
