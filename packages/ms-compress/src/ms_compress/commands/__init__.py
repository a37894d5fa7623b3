"""What `ms-compress` can do, one file a command; each is a skin over public functions."""

from ms_compress.commands.command import Command
from ms_compress.commands.distill import DISTILL
from ms_compress.commands.evaluate import EVALUATE
from ms_compress.commands.prune import PRUNE
from ms_compress.commands.qat import QAT
from ms_compress.commands.quantize import EXPORT, QUANTIZE

__all__ = ["COMMANDS", "Command"]

COMMANDS: tuple[Command, ...] = (QAT, PRUNE, DISTILL, QUANTIZE, EXPORT, EVALUATE)
"""In the order in which `--help` lists them."""
