"""Files that appear whole or not at all: written aside, synced, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ms_data.errors import OutputError

__all__ = ["publish", "sync_folder", "write_file", "writing"]


def write_file(path: Path, content: bytes) -> None:
    """Writes `content` to `path` so that a crash leaves the old file or the new one.

    Raises:
        OutputError: the disk is full or the place cannot be written.
    """
    aside = path.with_name(path.name + ".partial")
    with writing(path):
        # Renaming would put a file in the place of a device, pipe or folder.
        if path.exists() and not path.is_file():
            raise OutputError(f"{path} is there and is not a file; choose another name")
        try:
            with aside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            publish(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def publish(aside: Path, path: Path) -> None:
    """Renames the synced file or folder `aside` to `path`, and makes the new name durable."""
    aside.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an operating system's refusal to write `path` into one clear line."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise OutputError(
            f"cannot write {path}: {reason}; free some space or choose another place"
        ) from error
