"""The libraries of formats and runtimes: optional to install, and each with errors of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ms_compress.entry import one_line
from ms_compress.errors import ExportError

SHOWN_CHARACTERS = 200


def import_library(
    name: str, *, extra: str, purpose: str, error: type[Exception] = ExportError
) -> Any:
    """Import a library.

    Args:
        name: of its module.
        extra: of ms-compress that installs it.
        purpose: what needs it, such as `GGUF files need the gguf library`.
        error: the kind of error.

    Raises:
        error: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as raised:
        raise error(f"{purpose}: pip install 'ms-compress[{extra}]'") from raised


@contextmanager
def library_errors(place: Path, library: str, action: str = "read it") -> Iterator[None]:
    """Turn whatever a library makes of a damaged file into one line.

    Raises:
        ExportError: it cannot be read.
    """
    try:
        yield
    except ExportError:
        raise
    except Exception as error:  # the libraries' errors share no base but this
        words = one_line(str(error))[:SHOWN_CHARACTERS] or type(error).__name__
        raise ExportError(
            f"{place}: {library} cannot {action}: {words}; export it again"
        ) from error
