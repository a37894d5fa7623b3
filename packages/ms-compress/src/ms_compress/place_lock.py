"""One writer at a time of a folder that is not there yet.

The lock is the kernel's, on a file beside, so that a process that is killed leaves it open; the
file names its holder, and goes with it, as the folder beside it is all that shall be left.
"""

import fcntl
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ms_compress.errors import FolderError
from ms_compress.files.durable import whole_folder, writing
from ms_compress.files.run_folder import LOCKLESS

__all__ = ["alone", "new_folder"]

SHOWN_CHARACTERS = 300


@contextmanager
def new_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder that takes the name `folder` when all went well, as its one writer.

    Raises:
        FolderError: another process is writing it.
        WriteError: it is there already and `overwrite` is not given, or it cannot be written.
    """
    with (
        alone(folder.with_name(f"{folder.name}.partial")),
        whole_folder(folder, overwrite=overwrite) as aside,
    ):
        yield aside


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes that would do the same from `path`, whose folder is made if missing.

    Raises:
        FolderError: another process holds it.
        WriteError: the place cannot be written.
    """
    lock = path.with_name(f"{path.name}.lock")
    with writing(path):
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, holder = _locked(lock)
    if descriptor is None:
        raise FolderError(
            f"{path} is being written by {holder}; wait for it, or choose another place"
        )
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(lock: Path) -> tuple[int | None, str]:
    """A descriptor of the locked file that has this name, or who holds it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        free = _take(descriptor)
        if free and _is_named(descriptor, lock):
            command = shlex.join(sys.argv)[:SHOWN_CHARACTERS]
            words = f"process {os.getpid()} on {socket.gethostname()}: {command}"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, words.encode(errors="replace"), 0)
            return descriptor, words
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
        os.close(descriptor)
        if not free:
            shown = "".join(c for c in holder if c.isprintable())[:SHOWN_CHARACTERS]
            return None, shown or "another process"


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
