"""The subcommands of `ms-profile`, one a file, each a skin over public functions of the package.

Each has `HELP`, `EXAMPLE`, `add_arguments(parser)` and `execute(options) -> exit code`.
"""
