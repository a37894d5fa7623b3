"""The subcommands of `ms-profile`, one module each: thin wrappers around public functions.

Each module defines `HELP`, `EXAMPLE`, `add_arguments(parser)` and `execute(options) -> exit code`.
"""
