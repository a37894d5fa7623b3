"""Files and folders that appear whole or not at all: written aside, synced, then renamed."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from ms_compress.errors import CompressError, ExportError

__all__ = [
    "publish",
    "replace",
    "sync_folder",
    "write_all",
    "write_synced",
    "write_whole",
    "writing",
]


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


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a file beside `path`, make it durable, and put it in that one's place."""
    aside = path.with_name(f"{path.name}.new")
    write(aside)
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


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
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space; nothing is half-written, run the same command again"
        else:
            remedy = "choose another place"
        raise ExportError(f"cannot write {path}: {reason}; {remedy}") from error
