"""Files and folders that appear whole or not at all: written aside, synced, then renamed."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from ms_compress.errors import CompressError, ExportError

__all__ = [
    "alone",
    "publish",
    "replace",
    "sync_folder",
    "whole_folder",
    "write_all",
    "write_synced",
    "write_whole",
    "writing",
]

LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Of file systems without locks, where writing alone is left to the user."""


def write_all(file: FileIO, content: bytes | memoryview) -> None:
    """Write all of `content` to an unbuffered file, which may take it in parts."""
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and make its bytes durable."""
    with path.open("xb", buffering=0) as file:
        write_all(file, content)
        os.fsync(file.fileno())


def publish(aside: Path, path: Path) -> None:
    """Rename the synced file or folder `aside` to `path`, and make the new name durable."""
    aside.rename(path)
    sync_folder(path.parent)


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` write a file beside `path`, make it durable, and put it in that one's place."""
    aside = path.with_name(f"{path.name}.new")
    try:
        with aside.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def whole_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """An empty folder beside `folder`, which takes its name when all is well, else is removed.

    What a killed process left there is removed first.

    Raises:
        ExportError: `folder` is there, another process is writing it, or it cannot be written.
    """
    aside = folder.with_name(f"{folder.name}.partial")
    with alone(aside):
        if os.path.lexists(folder) and not overwrite:
            raise ExportError(f"{folder} exists; remove it, or choose another place")
        try:
            with writing(folder):
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
            yield aside
            with writing(folder):
                _sync_all(aside)
                if folder.exists():
                    shutil.rmtree(folder)
                publish(aside, folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes that would do the same from `path`, whose folder is made if missing.

    The lock is the kernel's, on a file beside, so that a process that is killed leaves it open.

    Raises:
        ExportError: another process holds it, or the place cannot be written.
    """
    lock = path.with_name(f"{path.name}.lock")
    with writing(path):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(lock)
    if descriptor is None:
        raise ExportError(
            f"another process is writing {path}; wait for it, or choose another place"
        )
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(lock: Path) -> int | None:
    """A descriptor of the locked file that has this name, or None if another process holds it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        free = _take(descriptor)
        if free and _is_named(descriptor, lock):
            return descriptor
        os.close(descriptor)
        if not free:
            return None


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in LOCKLESS:
            raise
    return True


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether it is the file at `path`: the lock's last holder may have removed the name since."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _sync_all(folder: Path) -> None:
    """Make all files in a folder durable, and their names."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(contents: Mapping[Path, bytes]) -> None:
    """Write small files that belong together: none appears before all of them are on the disk.

    Raises:
        ExportError: the disk refuses one.
    """
    asides = {path: path.with_name(f"{path.name}.partial") for path in contents}
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


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into one clear line.

    Raises:
        ExportError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except CompressError:
        raise
    except (OSError, RuntimeError) as raised:
        error = raised.__context__ if isinstance(raised, RuntimeError) else raised  # of torch.save
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or str(error) or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free some space; nothing is half-written, run the same command again"
        elif error.errno is None:  # numpy's, when not all was taken
            remedy = "the disk may be full; free some space, or choose another place"
        else:
            remedy = "choose another place"
        raise ExportError(f"cannot write {path}: {reason}; {remedy}") from raised
