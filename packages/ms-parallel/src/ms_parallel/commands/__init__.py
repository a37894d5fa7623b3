"""The subcommands, one a file: `HELP`, `EXAMPLE`, `add_arguments` and `run`; `cli` finds them."""
