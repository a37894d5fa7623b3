"""`ms-profile serve`: a live page of running and finished runs, on loopback."""

import argparse
from functools import partial
from typing import Final

from ms_profile.entry import path_argument
from ms_profile.live.server import serve

HELP: Final = "follow runs on a live page on this machine's loopback"
EXAMPLE: Final = "ms-profile serve ./runs --port 8642"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
    parser.add_argument(
        "folder", type=path_argument, metavar="RUN", help="folder of a run, or a folder of runs"
    )
    parser.add_argument(
        "--port", type=int, default=8642, metavar="N", help="0: any free one; default: 8642"
    )


def execute(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    serve(options.folder, port=options.port, on_ready=partial(print, flush=True))
    return 0
