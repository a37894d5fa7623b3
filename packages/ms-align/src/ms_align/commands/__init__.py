"""What `ms-align` can do, one file a command; each is a skin over a public class or function."""

from ms_align.commands import generate, offline, online
from ms_align.commands.command import Command

__all__ = ["COMMANDS", "Command"]

COMMANDS: tuple[Command, ...] = (
    *offline.COMMANDS,
    *online.COMMANDS,
    generate.COMMAND,
)
"""In the order in which `--help` lists them."""
