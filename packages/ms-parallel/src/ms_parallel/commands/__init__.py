"""Subcommands, one module each: `HELP`, `EXAMPLE`, `add_arguments` and `run`; used by `cli`."""
