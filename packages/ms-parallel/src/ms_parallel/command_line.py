"""What several subcommands share: `--json`, and how facts are printed."""

import sys
from argparse import ArgumentParser
from typing import Any

import msgspec

GIB = 1 << 30


def add_json(parser: ArgumentParser) -> None:
    """Add `--json`, which prints facts as one JSON document."""
    parser.add_argument("--json", action="store_true", help="print facts as JSON")


def print_json(facts: Any) -> int:
    """Print facts as one JSON document; returns the exit code of success."""
    encoded = msgspec.json.encode(facts, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    return 0
