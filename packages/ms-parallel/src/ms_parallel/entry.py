# A copy of shared_source/entry.py, made by `nox -s copies`; change it there.
"""The frame of a command: its version, its help, one line for each error, and its exit codes.

0 done, 1 failed or a check did not hold, 2 bad input, 130 after Ctrl-C. Importing this imports
nothing heavy, so that `--help` and `--version` answer at once.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from .files.untrusted import check_path

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

SIBLINGS = {
    "ms_align": "AlignError",
    "ms_compress": "CompressError",
    "ms_data": "DataError",
    "ms_kernels": "KernelError",
    "ms_parallel": "ParallelError",
    "ms_profile": "ProfileError",
}
"""The base of the errors that each package raises on purpose."""


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
        if not _on_purpose(error):
            raise
        sys.stderr.write(f"{prog}: {one_line(str(error))}\n")
        return exit_code(error)


def exit_code(error: BaseException) -> int:
    """Tell a failure (1) from what the user can mend (2).

    An error of ours says which it is by `exit_code`; else one that is also a RuntimeError is a
    failure only where its class says so.
    """
    return int(getattr(error, "exit_code", BAD_INPUT))


def one_line(text: str) -> str:
    """Text in one line that a terminal prints as it is: no line ends, no escapes."""
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)


def _on_purpose(error: BaseException) -> bool:
    """Whether a package raised it on purpose; no package is imported to find out."""
    bases = (getattr(sys.modules.get(name), base, None) for name, base in SIBLINGS.items())
    return any(isinstance(base, type) and isinstance(error, base) for base in bases)
