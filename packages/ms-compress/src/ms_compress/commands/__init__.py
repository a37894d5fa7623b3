"""What `ms-compress` can do, one file a command; each is a skin over a public class or function."""

from ms_compress.commands.command import Command

__all__ = ["COMMANDS", "Command"]

COMMANDS: tuple[Command, ...] = ()
"""In the order in which `--help` lists them."""
