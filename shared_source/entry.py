"""Command-line entry points: `--version`, help, one-line errors and exit codes.

Exit codes: 0 done, 1 failure or failed check, 2 bad input, 130 Ctrl-C. This module has no heavy
imports, so that `--help` and `--version` are fast.

Errors meant for the user have an integer class attribute `exit_code`, like the exceptions of click:
2 in the base class of a package's errors, 1 in errors that are not the user's mistake. Packages
therefore need not import the error classes of other packages.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from .files.untrusted import check_path
from .secret_text import without_secrets
from .used_settings import UsedIf, check_arguments_used

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class CommandParser(argparse.ArgumentParser):
    """Argument parser with one-line errors, `--version` and an example in the help.

    Args:
        prog: name of the command, such as `ms-data`.
        version: version of the package.
        description: one sentence about the command.
        example: complete command line for the help; subcommands define their own.
    """

    def __init__(
        self,
        prog: str | None = None,
        *,
        version: str | None = None,
        example: str | None = None,
        **options: object,
    ) -> None:
        if example is not None:
            options["epilog"] = f"example: {example}"
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(prog, **options)  # type: ignore[arg-type]  # argparse's own options
        self.used_if: tuple[UsedIf, ...] = ()
        """Conditions of options that another option can make useless."""
        self.register("type", None, _text_argument)  # default for arguments without a type
        if version is not None:
            version_line = f"{self.prog} {version}"
            self.add_argument("--version", action="version", version=version_line)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; an unknown option is an error that names the nearest one.

        Overrides of a run file may also follow options: argparse gives a positional with
        `nargs="*"` only what precedes the next option, so `RUN.toml --json seed=1` would leave
        `seed=1` over.
        """
        arguments = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # before argparse reports missing arguments instead
            self._check_options(arguments)
        options, extras = super().parse_known_args(arguments, namespace)
        self._check_options(extras)
        for argument in extras:
            if argument.startswith("-"):
                self.error(f"unknown option {argument}")
        if "set" in options:
            options.set, extras = [*options.set, *extras], []
        check_arguments_used(self, options, self.used_if)
        return options, extras

    def _check_options(self, arguments: Sequence[str]) -> None:
        """Exit with code 2 at an unknown option, naming the nearest; `--` ends the options."""
        for argument in takewhile(lambda argument: argument != "--", arguments):
            option = argument.partition("=")[0]
            if option.startswith("--") and option not in self._option_string_actions:
                self.error(f"unknown option {option}{self._suggestion(option)}")

    def _suggestion(self, word: str) -> str:
        """Return `; did you mean --OPTION?` for an unknown option, or an empty string."""
        from difflib import get_close_matches

        options = [option for option in self._option_string_actions if option.startswith("--")]
        matches = [option for option in options if option.startswith(word) and len(word) > 3]
        matches = matches or get_close_matches(word, options, n=1, cutoff=0.5)
        return f"; did you mean {' or '.join(matches)}?" if matches else ""

    def error(self, message: str) -> NoReturn:
        """Print a one-line error and exit with the code for bad input."""
        sys.stderr.write(f"{self.prog}: {one_line(message)}; see --help\n")
        sys.exit(BAD_INPUT)


def _text_argument(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not valid UTF-8") from error
    return text


def path_argument(text: str) -> Path:
    """Parse a path on the command line, as `type` of an argument."""
    check_path("the path", text, error=argparse.ArgumentTypeError)
    return Path(text)


def file_argument(text: str) -> Path:
    """Parse the path of an output file, as `type` of an argument."""
    check_path("the path", text, error=argparse.ArgumentTypeError, written="file")
    return Path(text)


def folder_argument(text: str) -> Path:
    """Parse the path of an output folder, as `type` of an argument."""
    check_path("the path", text, error=argparse.ArgumentTypeError, written="folder")
    return Path(text)


def perform(
    prog: str,
    run: Callable[[], int],
    *,
    report: Callable[[BaseException], int | None] | None = None,
) -> int:
    """Run a command and return its exit code; errors that the user can fix are printed as one line.

    Args:
        prog: name of the command, the prefix of lines on standard error.
        run: body of the command; returns its exit code.
        report: error handler of packages where one process reports for all ranks. It is called
            first, prints the line and returns the exit code, or None for the default handling.

    Raises:
        Exception: bugs of ours, with their traceback.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        if report is None or report(error) is None:
            sys.stderr.write(f"{prog}: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        reported_code = report(error) if report is not None else None
        if reported_code is not None:
            return reported_code
        error_code = exit_code(error)
        if error_code is None:
            raise
        sys.stderr.write(f"{prog}: {one_line(str(error))}\n")
        return error_code


def exit_code(error: BaseException) -> int | None:
    """Return the exit code declared by the class of an error; None if undeclared.

    Instance attributes are ignored: torch's `ProcessExitedException` has the exit code of another
    process there.
    """
    code = getattr(type(error), "exit_code", None)
    return code if isinstance(code, int) else None


def one_line(text: str) -> str:
    """Format text as one printable line, without newlines, escape sequences or secrets."""
    joined = without_secrets(" ".join(text.split()))
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)
