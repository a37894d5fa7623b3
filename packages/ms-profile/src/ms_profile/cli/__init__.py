"""The command `ms-profile`: a skin over the package's public functions, one file a subcommand.

Each of `COMMANDS` is a module here with `NAME`, `HELP`, `EXAMPLE`, `add_arguments(parser)` and
`execute(options) -> int`. Only the one that is asked for is imported.
"""

from ms_profile.cli.main import main

__all__ = ["main"]
