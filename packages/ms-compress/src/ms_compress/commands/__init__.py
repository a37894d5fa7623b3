"""What `ms-compress` can do, one file a command; each is a skin over a public class or function."""

from ms_compress.commands.command import Command
from ms_compress.commands.evaluate import EVALUATE

__all__ = ["COMMANDS", "Command"]

COMMANDS: tuple[Command, ...] = (EVALUATE,)
"""In the order in which `--help` lists them."""
