"""`ms-parallel doctor`: names the command of ms-profile that replaced it."""

from argparse import ArgumentParser, Namespace

HELP = "moved to ms-profile doctor"
EXAMPLE = "ms-profile doctor"


def add_arguments(parser: ArgumentParser) -> None:
    """Accept any command line of the earlier command, so that `run` can name the new one."""
    parser.add_argument("arguments", nargs="*", help="ignored")
    parser.prefix_chars = ""  # options count as arguments


def run(options: Namespace) -> int:
    """Raise an error that names the new command."""
    from ms_parallel.errors import ConfigError

    raise ConfigError(
        "doctor is now a command of ms-profile; pip install 'ms-profile[torch]' and run"
        " `ms-profile doctor`, or under torchrun `-m ms_profile doctor`"
    )
