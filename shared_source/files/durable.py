"""Atomic writes: a temporary file or folder is written, synced, then renamed to its target."""

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
    """Write all of `content` to an unbuffered file, whose `write` may be partial."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def write_synced(path: Path, content: bytes | memoryview) -> None:
    """Write a new file and fsync it."""
    with path.open("xb", buffering=0) as file:
        write_all(file, content)
        os.fsync(file.fileno())


def write_file(path: Path, content: bytes | memoryview) -> None:
    """Write `content` to `path` atomically: a crash leaves either the old file or the new one.

    Raises:
        WriteError: the disk is full, `path` cannot be written, or it is not a regular file.
    """
    replace(path, lambda file: file.write(content))


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write a set of small files; none is renamed to its path before all have been synced.

    Raises:
        WriteError: a file cannot be written.
    """
    temporaries = {path: _temporary_path(path) for path in contents}
    try:
        for path, temporary in temporaries.items():
            with writing(path):
                temporary.unlink(missing_ok=True)
                write_synced(temporary, contents[path])
        for path, temporary in temporaries.items():
            with writing(path):
                publish(temporary, path)
    except BaseException:
        for temporary in temporaries.values():
            with suppress(OSError):
                temporary.unlink()
        raise


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file `path` atomically with the output of `write`.

    Args:
        path: file to replace or create.
        write: called with a temporary file in the same folder.

    Raises:
        WriteError: the disk is full, `path` cannot be written, or it is not a regular file.
    """
    temporary = _temporary_path(path)
    with writing(path):
        # Renaming would replace a device or pipe with a file.
        if path.exists() and not path.is_file():
            raise WriteError(f"{path} exists and is not a regular file; use another name")
        try:
            temporary.unlink(missing_ok=True)
            # "x": never follow a symlink that someone planted under the predictable name.
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, path)
        except BaseException:
            with suppress(OSError, ValueError):
                temporary.unlink(missing_ok=True)
            raise


def publish(temporary: Path, path: Path) -> None:
    """Rename a synced temporary file or folder to `path` and fsync the parent folder."""
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that renames and new files in it survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Fsync a folder and everything in it, recursively."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        elif path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


@contextmanager
def writing(path: Path, *, remedy: str = "use another path") -> Iterator[None]:
    """Convert the operating system's errors about writing `path` into a one-line WriteError.

    Raises:
        WriteError: the disk is full, or `path` cannot be written.
    """
    try:
        yield
    except ValueError as caught:
        if "null byte" not in str(caught) and not isinstance(caught, UnicodeEncodeError):
            raise
        raise WriteError(f"cannot write {str(path)!r}: not a valid path; {remedy}") from caught
    except (OSError, RuntimeError) as caught:
        if type(caught).__module__ == WriteError.__module__:  # already converted
            raise
        # torch.save wraps the OSError in a RuntimeError.
        os_error = caught.__context__ if isinstance(caught, RuntimeError) else caught
        if not isinstance(os_error, OSError):
            raise
        reason = os_error.strerror or str(os_error) or type(os_error).__name__
        if os_error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free some space and rerun; files written earlier are intact"
        elif os_error.errno is None:  # numpy's error after a partial write
            remedy = "the disk may be full; free some space or use another path"
        raise WriteError(f"cannot write {path}: {reason}; {remedy}") from caught


@contextmanager
def atomic_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder; rename it to `folder` on success, delete it on an error.

    A killed process leaves the old folder intact, and its temporary folder is deleted by the next
    call. Exclude concurrent writers with `run_folder.locked`.

    Raises:
        WriteError: `folder` exists and `overwrite` is false, or it cannot be written.
    """
    temporary = _temporary_path(folder)
    with writing(folder):
        restore_folder(folder)
    if os.path.lexists(folder) and not overwrite:
        raise WriteError(f"{folder} exists; remove it or use another path")
    try:
        with writing(folder):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        yield temporary
        with writing(folder):
            sync_tree(temporary)
            replace_folder(folder, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_folder(folder: Path, temporary: Path) -> None:
    """Rename the synced folder `temporary` to `folder`, which is replaced if it exists.

    SIGKILL at any time leaves either the old folder or the new one intact. Where the file system
    cannot exchange two names atomically, the old folder may be left as `*.replaced`;
    `restore_folder` moves it back.
    """
    if not folder.is_dir() or folder.is_symlink():
        publish(temporary, folder)
    elif _exchange(temporary, folder):
        sync_folder(folder.parent)
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        old = _replaced(folder)
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        try:
            publish(temporary, folder)
        except BaseException:
            old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)


def restore_folder(folder: Path) -> None:
    """Clean up after a killed `replace_folder`: move the old folder back, or delete it."""
    old = _replaced(folder)
    if os.path.lexists(folder):
        shutil.rmtree(old, ignore_errors=True)
    elif old.is_dir() and not old.is_symlink():
        publish(old, folder)


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of renameat2(2), Linux."""


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders atomically; return False if that is not supported."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    status = renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))
    return int(status) == 0


def _replaced(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.replaced")


def _temporary_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
