"""Files and folders that appear whole or not at all: written aside, synced, then renamed."""

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from ..errors import WriteError


def write_all(file: FileIO, content: bytes | memoryview) -> None:
    """Write all of `content` to an unbuffered file, which may take it in parts."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def write_synced(path: Path, content: bytes | memoryview) -> None:
    """Write a new file and make its bytes durable."""
    with path.open("xb", buffering=0) as file:
        write_all(file, content)
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write `content` to `path` so that a crash leaves the old file or the new one.

    Raises:
        WriteError: the disk is full, the place cannot be written, or `path` is no file.
    """
    replace(path, lambda file: file.write(content))


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write small files that belong together: none appears before all of them are on the disk.

    Raises:
        WriteError: the disk refuses one.
    """
    asides = {path: _aside(path) for path in contents}
    try:
        for path, aside in asides.items():
            with writing(path):
                aside.unlink(missing_ok=True)
                write_synced(aside, contents[path])
        for path, aside in asides.items():
            with writing(path):
                publish(aside, path)
    except BaseException:
        for aside in asides.values():
            with suppress(OSError):
                aside.unlink()
        raise


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` write a file beside `path`, make it durable, and put it in the place of `path`.

    Raises:
        WriteError: the disk is full, the place cannot be written, or `path` is no file.
    """
    aside = _aside(path)
    with writing(path):
        # Renaming would put a file in the place of a device, pipe or folder.
        if path.exists() and not path.is_file():
            raise WriteError(f"{path} is there and is not a file; choose another name")
        try:
            aside.unlink(missing_ok=True)
            # "x": never through a link that somebody put under the predictable name.
            with aside.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            publish(aside, path)
        except BaseException:
            with suppress(OSError, ValueError):
                aside.unlink(missing_ok=True)
            raise


def publish(aside: Path, path: Path) -> None:
    """Rename the synced file or folder `aside` to `path`, and make the new name durable."""
    aside.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make all files below a folder durable, and their names."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


@contextmanager
def writing(path: Path, *, remedy: str = "choose another place") -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into one clear line.

    Raises:
        WriteError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except ValueError as raised:
        if "null byte" not in str(raised) and not isinstance(raised, UnicodeEncodeError):
            raise
        raise WriteError(f"cannot write {str(path)!r}: no system takes it; {remedy}") from raised
    except (OSError, RuntimeError) as raised:
        if type(raised).__module__ == WriteError.__module__:  # said already
            raise
        # torch.save wraps the refusal of the operating system in a RuntimeError.
        error = raised.__context__ if isinstance(raised, RuntimeError) else raised
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or str(error) or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free some space; what was written before is whole, run the same again"
        elif error.errno is None:  # numpy's, when not all was taken
            remedy = "the disk may be full; free some space, or choose another place"
        raise WriteError(f"cannot write {path}: {reason}; {remedy}") from raised


@contextmanager
def whole_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty folder that gets the name `folder` if all goes well, and else is removed.

    A killed process leaves the old folder, whole; what else it left is removed first. Keep other
    writers out with `run_folder.locked`.

    Raises:
        WriteError: `folder` is there and `overwrite` is not given, or it cannot be written.
    """
    aside = _aside(folder)
    with writing(folder):
        restore_folder(folder)
    if os.path.lexists(folder) and not overwrite:
        raise WriteError(f"{folder} exists; remove it, or choose another place")
    try:
        with writing(folder):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        yield aside
        with writing(folder):
            sync_tree(aside)
            replace_folder(folder, aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def replace_folder(folder: Path, aside: Path) -> None:
    """Replace `folder`, if it exists, with the synced folder `aside`.

    SIGKILL at any moment leaves the old folder or the new one, whole: under its name where the file
    system can exchange two names in one call, elsewhere perhaps as `*.replaced`, which
    `restore_folder` puts back.
    """
    if not folder.is_dir() or folder.is_symlink():
        publish(aside, folder)
    elif _exchange(aside, folder):
        sync_folder(folder.parent)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        old = _replaced(folder)
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        try:
            publish(aside, folder)
        except BaseException:
            old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)


def restore_folder(folder: Path) -> None:
    """Put back a folder that a killed `replace_folder` had moved away, or drop the moved one."""
    old = _replaced(folder)
    if os.path.lexists(folder):
        shutil.rmtree(old, ignore_errors=True)
    elif old.is_dir() and not old.is_symlink():
        publish(old, folder)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2), Linux."""


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    failed = call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))
    return int(failed) == 0


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
