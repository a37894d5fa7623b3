# A copy of shared_source/entry.py, made by `nox -s copies`; change it there.
"""The frame of a command: its version, its help, one line for each error, and its exit codes.

0 done, 1 failed or a check did not hold, 2 bad input, 130 after Ctrl-C. Importing this imports
nothing heavy, so that `--help` and `--version` answer at once.

An error that a user can understand says so itself: its class has a whole number `exit_code`, as
the exceptions of click have. The base of each package's errors has 2, and errors that are no
mistake of the user's have 1. So no package names the errors of another.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from .files.untrusted import check_path
from .secret_text import without_secrets

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaint is one line, with `--version`, and an example in each help.

    Args:
        prog: the command, such as `ms-data`.
        version: of the package.
        description: what it does, in one sentence.
        example: a line that can be typed; the subcommands have theirs.
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
        self.register("type", None, _text_argument)  # of each argument that names no type
        if version is not None:
            words = f"{self.prog} {version}"
            self.add_argument("--version", action="version", version=words)

    def error(self, message: str) -> NoReturn:
        """End with the exit code for bad input, and one line."""
        sys.stderr.write(f"{self.prog}: {one_line(message)}; --help shows what is known\n")
        sys.exit(BAD_INPUT)


def _text_argument(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not UTF-8; give a text") from error
    return text


def path_argument(text: str) -> Path:
    """Take a path from the command line: the `type` of each argument that is one."""
    check_path("the path", text, error=argparse.ArgumentTypeError)
    return Path(text)


def file_argument(text: str) -> Path:
    """Take the path of a file that is to be written."""
    check_path("the path", text, error=argparse.ArgumentTypeError, written="file")
    return Path(text)


def folder_argument(text: str) -> Path:
    """Take the path of a folder that is to be written."""
    check_path("the path", text, error=argparse.ArgumentTypeError, written="folder")
    return Path(text)


def perform(
    prog: str,
    run: Callable[[], int],
    *,
    report: Callable[[BaseException], int | None] | None = None,
) -> int:
    """Run a command and return its exit code, with one line for whatever the user can mend.

    Args:
        prog: begins each line on standard error.
        run: the command itself; returns its exit code.
        report: for a package of several processes, where one speaks for all: is given the error
            first, writes the line itself and returns the exit code, or None to leave it to others.

    Raises:
        Exception: what is nobody's mistake but ours keeps its traceback.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as error:
        if report is None or report(error) is None:
            sys.stderr.write(f"{prog}: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        code_of_report = report(error) if report is not None else None
        if code_of_report is not None:
            return code_of_report
        code_of_error = exit_code(error)
        if code_of_error is None:
            raise
        sys.stderr.write(f"{prog}: {one_line(str(error))}\n")
        return code_of_error


def exit_code(error: BaseException) -> int | None:
    """Return the exit code that the class of an error declares; None where it declares none.

    An instance's attribute does not count: torch's `ProcessExitedException` keeps another
    process's exit code there.
    """
    code = getattr(type(error), "exit_code", None)
    return code if isinstance(code, int) else None


def one_line(text: str) -> str:
    """Put a text on one line that a terminal prints as it is: no line ends, escapes or secrets."""
    joined = without_secrets(" ".join(text.split()))
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)
