"""Import optional libraries of formats and runtimes, and convert their errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ms_compress.entry import one_line
from ms_compress.errors import ExportError

MAX_CHARACTERS = 200


def import_library(
    name: str, *, extra: str, purpose: str, error: type[Exception] = ExportError
) -> Any:
    """Import a library.

    Args:
        name: module name.
        extra: extra of ms-compress that installs it.
        purpose: start of the error message, such as `GGUF files need the gguf library`.
        error: exception class to raise.

    Raises:
        error: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as raised:
        raise error(f"{purpose}: pip install 'ms-compress[{extra}]'") from raised


@contextmanager
def library_errors(path: Path, library: str, action: str = "read it") -> Iterator[None]:
    """Convert any exception of a library into a one-line error.

    Raises:
        ExportError: the library failed.
    """
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # the libraries' exceptions have no other common base class
        words = one_line(str(error))[:MAX_CHARACTERS] or type(error).__name__
        raise ExportError(f"{path}: {library} cannot {action}: {words}; export it again") from error
