"""The `--json` option that several subcommands have."""

import sys
from argparse import ArgumentParser
from typing import Any

import msgspec

GIB = 1 << 30


def add_json(parser: ArgumentParser) -> None:
    """Add `--json`, which prints the result as one JSON document."""
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def print_json(facts: Any) -> int:
    """Print facts as one JSON document; return exit code 0."""
    encoded = msgspec.json.encode(facts, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    return 0
