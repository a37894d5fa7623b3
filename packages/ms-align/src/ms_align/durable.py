"""Files and folders that appear whole or not at all: written aside, synced, then renamed."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from ms_align.errors import AlignError, CheckpointError

__all__ = ["alone", "publish", "sync_folder", "write_all", "write_synced", "writing"]

LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Of file systems without locks, where writing alone is left to the user."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other runs out of `folder`, which is made if missing.

    The lock is the kernel's, on a file that stays, so that a run that is killed leaves it open.

    Raises:
        CheckpointError: another run holds it, or the place cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with writing(folder):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another run is writing {folder}; wait for it, or choose another output_dir"
                ) from error
            except OSError as error:
                if error.errno not in LOCKLESS:
                    raise
        yield
    finally:
        os.close(descriptor)


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


def sync_folder(folder: Path) -> None:
    """Make the names inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal to write `path` into one clear line.

    Raises:
        CheckpointError: the disk is full, or the place cannot be written.
    """
    try:
        yield
    except AlignError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space; what was saved before is whole, run the same command again"
        else:
            remedy = "choose another output_dir"
        raise CheckpointError(f"cannot write {path}: {reason}; {remedy}") from error
