"""Readers for untrusted files, with size limits and a single error class.

Deep nesting, invalid UTF-8, numbers out of range, invalid paths and other decoder failures are
raised as the caller's error class, with a one-line message: the file, the problem, the fix.
"""

import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

LIMIT_BYTES = 256 * 2**20
"""Default limit for files of settings, names or vocabularies."""

MAX_MESSAGE_CHARACTERS = 200
"""Length limit for a path or a decoder's message in an error."""

DEEP_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){100}""")
"""A dotted TOML key of more than a hundred parts."""

LONG_NUMBER = re.compile(r"\d{39}")
BYTES_LONG_NUMBER = re.compile(LONG_NUMBER.pattern.encode())
"""At least 39 digits: an integer of possibly more than 128 bits, or part of a string."""

PATH_BYTES = 4095
NAME_BYTES = 255
"""Maximum length of a path and of a file name (PATH_MAX and NAME_MAX in limits.h)."""
SUFFIX_BYTES = 15
"""Bytes reserved in a file name for the suffix of its temporary file."""

T = TypeVar("T")


def check_path(
    name: str,
    value: object,
    *,
    error: type[Exception],
    optional: bool = False,
    written: Literal["file", "folder"] | None = None,
) -> None:
    """Check early that a value is a usable path; it need not exist.

    Args:
        name: name of the setting or argument, for the message.
        value: string or path; must be valid UTF-8, since it is stored in other files.
        error: exception class to raise.
        optional: accept None.
        written: kind of output that will be written to the path, if any.

    Raises:
        error: the value is not a string, is empty, too long or not UTF-8, contains a NUL or a
            symlink loop, or the output cannot be created there.
    """
    if optional and value is None:
        return
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise error(f"{name} must be a path, got {_printable(repr(value))}")
    problem = _invalid_path(text) or _not_writable(text, written)
    if problem:
        raise error(f"{name} is {_printable(repr(text))}, {problem}; use another path")


def open_file(path: str | Path, *, error: type[Exception]) -> FileIO:
    """Open a regular file for unbuffered reading; never block on a pipe or device.

    Raises:
        error: it is not a regular file.
        OSError: it does not exist or cannot be opened.
    """
    # Without O_NONBLOCK, opening a pipe that has no writer would block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{_printable(path)}: not a file")
    return FileIO(descriptor, "rb")


def check_file(path: str | Path, *, error: type[Exception]) -> None:
    """Reject a pipe or device before a library opens the path, which could block.

    Raises:
        error: it exists and is not a regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # the library reports a missing file
    if not stat.S_ISREG(mode):
        raise error(f"{_printable(path)}: not a file")


def read_bytes(
    path: str | Path, *, error: type[Exception], limit_bytes: int = LIMIT_BYTES
) -> bytes:
    """Read a file of at most `limit_bytes`. The size is checked before memory is allocated.

    Raises:
        error: the file does not exist, cannot be read or is too large.
    """
    with decoding(path, error=error), BufferedReader(open_file(path, error=error)) as file:
        size = os.fstat(file.fileno()).st_size
        fits = size <= limit_bytes
        # Pass the file's size, not the limit: read() allocates its argument.
        content = file.read(size) if fits else b""
    if not fits:
        raise error(f"{_printable(path)}: larger than the limit of {limit_bytes / 2**20:g} MiB")
    return content


def read_text(path: str | Path, *, error: type[Exception], limit_bytes: int = LIMIT_BYTES) -> str:
    """Read a UTF-8 file like `read_bytes` and strip a byte order mark."""
    content = read_bytes(path, error=error, limit_bytes=limit_bytes)
    with decoding(path, error=error):
        return content.decode("utf-8-sig")


def read_json(
    path: str | Path,
    cls: type[T],
    *,
    error: type[Exception],
    limit_bytes: int = LIMIT_BYTES,
) -> T:
    """Read a JSON file and validate it as type `cls`, such as `dict` or a msgspec Struct."""
    content = read_bytes(path, error=error, limit_bytes=limit_bytes)
    return decode_json(content, cls, where=path, error=error)


def decode_json(
    content: bytes | str, cls: type[T], *, where: str | Path, error: type[Exception]
) -> T:
    """Decode JSON and validate it as type `cls`; `where` names the source in errors.

    Integers of more than 128 bits are rejected: no count is that large.
    """
    with decoding(where, error=error):
        long_number = LONG_NUMBER if isinstance(content, str) else BYTES_LONG_NUMBER
        if long_number.search(content):  # type: ignore[arg-type]
            _check_numbers(msgspec.json.decode(content))
        return msgspec.json.decode(content, type=cls)


def read_toml(path: str | Path, *, error: type[Exception]) -> dict[str, Any]:
    """Read a TOML file; integers of more than 128 bits are rejected."""
    content = read_text(path, error=error, limit_bytes=2**24)
    # tomllib takes quadratic time for dotted keys of many parts: minutes for 100 kB.
    if DEEP_KEY.search(content):
        raise error(f"{_printable(path)}: nested too deeply to be read")
    with decoding(path, error=error):
        try:
            document = tomllib.loads(content)
        except tomllib.TOMLDecodeError as decode_error:
            raise error(
                f"{_printable(path)}: not TOML: {_one_line(decode_error)}"
            ) from decode_error
        _check_numbers(document)
        return document


@contextmanager
def decoding(where: str | Path, *, error: type[Exception]) -> Iterator[None]:
    """Convert a decoder's exceptions into a one-line `error` that names `where`.

    An `error` raised inside passes through. Only exceptions that file content can cause are
    converted; bugs, such as an AttributeError, keep their traceback.
    """
    try:
        yield
    except error:
        raise
    except RecursionError as raised:
        raise error(f"{_printable(where)}: nested too deeply to be read") from raised
    except UnicodeError as raised:
        raise error(f"{_printable(where)}: not UTF-8 text: {_one_line(raised)}") from raised
    except MemoryError as raised:
        raise error(f"{_printable(where)}: needs more memory than is available") from raised
    except OSError as raised:
        reason = raised.strerror or _one_line(raised)
        raise error(f"{_printable(where)}: cannot be read: {reason}") from raised
    except (ValueError, TypeError, LookupError, ArithmeticError, EOFError) as raised:
        raise error(f"{_printable(where)}: {_one_line(raised)}") from raised


def _check_numbers(value: object, name: str = "") -> None:
    if isinstance(value, int) and value.bit_length() > 128:
        raise ValueError(f"{name} is an integer of more than 128 bits".strip())
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(item, f"{name}.{key}".strip("."))


COUNT_KEY = re.compile(r"(?:layers|experts)$|^(?:n|num)_\w*(?:layer|expert)")
MAX_LAYERS = 4096
"""Maximum number of layers or experts; other libraries would build any number from a config."""


def check_parts(folder: str | Path, *, error: type[Exception]) -> None:
    """Check that the numbers of layers and experts in a folder's config.json are plausible.

    Raises:
        error: a number exceeds `MAX_LAYERS`, or config.json cannot be read.
    """
    path = Path(folder) / "config.json"
    pending: list[Any] = [read_json(path, dict, error=error)]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
            continue
        for name, value in node.items() if isinstance(node, dict) else ():
            is_count = isinstance(value, int | float) and COUNT_KEY.search(name)
            if is_count and value > MAX_LAYERS:
                raise error(f"{path}: {name} must be at most {MAX_LAYERS}, got {value:g}")
            pending.append(value)


def _invalid_path(text: str) -> str:
    """Return the reason a string cannot be a path; empty if it can."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return "which is not valid UTF-8"
    if b"\0" in encoded:
        return "which contains a NUL"
    if len(encoded) > PATH_BYTES or any(len(part) > NAME_BYTES for part in encoded.split(b"/")):
        return "which is longer than the system allows"
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""  # reported when the path is used
    except OSError as os_error:
        return f"which cannot be followed: {os_error.strerror}"
    return ""


def _not_writable(text: str, written: str | None) -> str:
    """Return the reason a file or folder cannot be written to a path; empty if it can."""
    if written is None:
        return ""
    path = Path(text)
    if len(path.name.encode()) > NAME_BYTES - SUFFIX_BYTES:
        return f"whose last part is longer than {NAME_BYTES - SUFFIX_BYTES} bytes"
    if written == "file" and (text.endswith("/") or path.name in ("", "..") or path.is_dir()):
        return "which is a folder, but a file will be written"
    if written == "folder" and path.exists() and not path.is_dir():
        return "which is a file, but a folder will be written"
    ancestor = next((parent for parent in path.parents if os.path.lexists(parent)), None)
    if ancestor is not None and not ancestor.is_dir():
        return f"but {_printable(ancestor)} is not a folder"
    return ""


def _printable(where: str | Path) -> str:
    """Format a path for a message: printable, on one line, shortened."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(where)[:4096])
    half = MAX_MESSAGE_CHARACTERS // 2
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:half]}...{text[-half:]}"


def _one_line(raised: BaseException) -> str:
    """Format a decoder's message on one printable line."""
    text = " ".join(str(raised).split()) or type(raised).__name__
    text = "".join(
        c if c.isprintable() else repr(c)[1:-1] for c in text[: 2 * MAX_MESSAGE_CHARACTERS]
    )
    if isinstance(raised, KeyError):
        text = f"{text} is missing"
    return text[:MAX_MESSAGE_CHARACTERS]
