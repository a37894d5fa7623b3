# A copy of shared_source/files/untrusted.py, made by `nox -s copies`; change it there.
"""Reads files that somebody else may have written or damaged: bounded, and with one kind of error.

Whatever such a file does to a decoder (nesting that exhausts the stack, bytes that are no text,
numbers that no type holds, a path that no system takes) becomes the error that the caller names,
in one line: which file, what is wrong, what to do.
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
"""The largest file of settings, names or a vocabulary that is read."""

SHOWN_CHARACTERS = 200
"""Most characters of a path, or of a decoder's own words, that a message shows."""

DEEP_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]++[ \t]*+\.[ \t]*+){100}""")
"""A hundred names with dots between them."""

LONG_NUMBER = re.compile(r"\d{39}")
BYTES_LONG_NUMBER = re.compile(LONG_NUMBER.pattern.encode())
"""So many digits stand in every whole number of over 128 bits, and in some texts."""

PATH_BYTES = 4095
NAME_BYTES = 255
"""Longest name that a file system takes; see PATH_MAX and NAME_MAX in limits.h."""
ASIDE_BYTES = 15
"""Bytes by which the name of a file that is written aside is longer."""

T = TypeVar("T")


def check_path(
    name: str,
    value: object,
    *,
    error: type[Exception],
    optional: bool = False,
    written: Literal["file", "folder"] | None = None,
) -> None:
    """Refuse what no system takes for a path, before any work is done.

    Whether there is something to read is left to whoever reads it.

    Args:
        name: of the setting or argument, for the message.
        value: a text or path; UTF-8, since other files and pages are to name it.
        error: raised over it.
        optional: None passes.
        written: what is written there at the end; it must then be able to stand there.

    Raises:
        error: it is no text, empty, endless, no UTF-8, holds a NUL, or its links run in a circle;
            or what is written could not stand there.
    """
    if optional and value is None:
        return
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise error(f"{name} is {_shown(repr(value))}; give a path")
    problem = _never_a_path(text) or _not_for(text, written)
    if problem:
        raise error(f"{name} is {_shown(repr(text))}, {problem}; give another path")


def open_file(path: str | Path, *, error: type[Exception]) -> FileIO:
    """Open a regular file for reading, unbuffered; a pipe or device is refused, never waited for.

    Raises:
        error: it is not a regular file.
        OSError: there is no such file, or it cannot be opened.
    """
    # O_NONBLOCK: opening a pipe that nobody writes to would block forever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise error(f"{_shown(path)}: not a file")
    return FileIO(descriptor, "rb")


def check_file(path: str | Path, *, error: type[Exception]) -> None:
    """Check that a library which opens `path` by its name will not wait for a pipe or device.

    Raises:
        error: it is there and is not a regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # whoever opens it reports what is missing
    if not stat.S_ISREG(mode):
        raise error(f"{_shown(path)}: not a file")


def read_bytes(
    path: str | Path, *, error: type[Exception], limit_bytes: int = LIMIT_BYTES
) -> bytes:
    """Read a whole file of at most `limit_bytes`; its size is checked before memory is taken.

    Raises:
        error: there is no such file, it cannot be read, or it is larger.
    """
    with decoding(path, error=error), BufferedReader(open_file(path, error=error)) as file:
        size = os.fstat(file.fileno()).st_size
        fits = size <= limit_bytes
        # Never the whole limit: a reader takes the memory that it is asked for.
        content = file.read(size) if fits else b""
    if not fits:
        raise error(
            f"{_shown(path)}: larger than {limit_bytes / 2**20:g} MiB, which no such file is"
        )
    return content


def read_text(path: str | Path, *, error: type[Exception], limit_bytes: int = LIMIT_BYTES) -> str:
    """Read a file of UTF-8, as `read_bytes` does; a byte order mark at its start is left out."""
    content = read_bytes(path, error=error, limit_bytes=limit_bytes)
    with decoding(path, error=error):
        return content.decode("utf-8-sig")


def read_json(
    path: str | Path,
    kind: type[T],
    *,
    error: type[Exception],
    limit_bytes: int = LIMIT_BYTES,
) -> T:
    """Read a file of JSON as the type `kind` (`dict`, a Struct), which msgspec checks."""
    content = read_bytes(path, error=error, limit_bytes=limit_bytes)
    return decode_json(content, kind, where=path, error=error)


def decode_json(
    content: bytes | str, kind: type[T], *, where: str | Path, error: type[Exception]
) -> T:
    """Decode JSON as a value of the type `kind`; `where` is what a message calls it.

    A whole number of over 128 bits is refused: nothing is counted so far, and no float holds it.
    """
    with decoding(where, error=error):
        long = LONG_NUMBER if isinstance(content, str) else BYTES_LONG_NUMBER
        if long.search(content):  # type: ignore[arg-type]
            _check_numbers(msgspec.json.decode(content))
        return msgspec.json.decode(content, type=kind)


def read_toml(path: str | Path, *, error: type[Exception]) -> dict[str, Any]:
    """Read a file of TOML, without whole numbers of over 128 bits."""
    content = read_text(path, error=error, limit_bytes=2**24)
    # Of a key with so many parts tomllib reads each again and again: minutes for 100 kB.
    if DEEP_KEY.search(content):
        raise error(f"{_shown(path)}: nested too deeply to be read")
    with decoding(path, error=error):
        try:
            found = tomllib.loads(content)
        except tomllib.TOMLDecodeError as raised:
            raise error(f"{_shown(path)}: not TOML: {_words(raised)}") from raised
        _check_numbers(found)
        return found


@contextmanager
def decoding(where: str | Path, *, error: type[Exception]) -> Iterator[None]:
    """Turn whatever a decoder raises over `where` into one line of `error`.

    An `error` raised inside passes as it is. Only what content can cause is caught: a bug of ours,
    such as an AttributeError, keeps its traceback.
    """
    try:
        yield
    except error:
        raise
    except RecursionError as raised:
        raise error(f"{_shown(where)}: nested too deeply to be read") from raised
    except UnicodeError as raised:
        raise error(f"{_shown(where)}: not UTF-8 text: {_words(raised)}") from raised
    except MemoryError as raised:
        raise error(f"{_shown(where)}: asks for more memory than there is") from raised
    except OSError as raised:
        reason = raised.strerror or _words(raised)
        raise error(f"{_shown(where)}: cannot be read: {reason}") from raised
    except (ValueError, TypeError, LookupError, ArithmeticError, EOFError) as raised:
        raise error(f"{_shown(where)}: {_words(raised)}") from raised


def _check_numbers(found: object, name: str = "") -> None:
    if isinstance(found, int) and found.bit_length() > 128:
        raise ValueError(f"{name} is a whole number of more than 128 bits".strip())
    if isinstance(found, list):
        found = dict(enumerate(found))
    if isinstance(found, dict):
        for key, each in found.items():
            _check_numbers(each, f"{name}.{key}".strip("."))


PARTS = re.compile(r"(?:layers|experts)$|^(?:n|num)_\w*(?:layer|expert)")
MOST_PARTS = 4096
"""Most layers or experts of a model; other libraries would build as many as a file says."""


def check_parts(folder: str | Path, *, error: type[Exception]) -> None:
    """Refuse a folder whose config.json asks for more layers or experts than any model has.

    Raises:
        error: it does, or there is no config.json that can be read.
    """
    path = Path(folder) / "config.json"
    left: list[Any] = [read_json(path, dict, error=error)]
    while left:
        found = left.pop()
        if isinstance(found, list):
            left += found
            continue
        for name, value in found.items() if isinstance(found, dict) else ():
            counted = isinstance(value, int | float) and PARTS.search(name)
            if counted and value > MOST_PARTS:
                raise error(f"{path}: {name} is {value:g}; give at most {MOST_PARTS}")
            left.append(value)


def _never_a_path(text: str) -> str:
    """Tell why no system takes a text for a path; empty where one does."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        return "which is not UTF-8"
    if b"\0" in encoded:
        return "which holds a NUL"
    if len(encoded) > PATH_BYTES or any(len(one) > NAME_BYTES for one in encoded.split(b"/")):
        return "which is longer than any that a system takes"
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""  # whoever needs what is there says so
    except OSError as raised:
        return f"which cannot be followed: {raised.strerror}"
    return ""


def _not_for(text: str, written: str | None) -> str:
    """Tell why a file or folder cannot be written at a path; empty where it can."""
    if written is None:
        return ""
    path = Path(text)
    if len(path.name.encode()) > NAME_BYTES - ASIDE_BYTES:
        return f"whose last part is longer than {NAME_BYTES - ASIDE_BYTES} bytes"
    if written == "file" and (text.endswith("/") or path.name in ("", "..") or path.is_dir()):
        return "where a folder stands, and a file is to be written"
    if written == "folder" and path.exists() and not path.is_dir():
        return "where a file stands, and a folder is to be written"
    above = next((one for one in path.parents if os.path.lexists(one)), None)
    if above is not None and not above.is_dir():
        return f"and {_shown(above)} is no folder"
    return ""


def _shown(where: str | Path) -> str:
    """Write a path as a message may hold it: printable, in one line, not endless."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(where)[:4096])
    half = SHOWN_CHARACTERS // 2
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:half]}...{text[-half:]}"


def _words(raised: BaseException) -> str:
    """Write what a decoder said, in one printable line."""
    text = " ".join(str(raised).split()) or type(raised).__name__
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: 2 * SHOWN_CHARACTERS])
    if isinstance(raised, KeyError):
        text = f"{text} is missing"
    return text[:SHOWN_CHARACTERS]
