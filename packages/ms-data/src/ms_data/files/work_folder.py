"""The temporary folder of a long job, next to its output folder, with a lock and a journal."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from ms_data.errors import OutputError
from ms_data.files.durable import write_file, writing
from ms_data.files.untrusted import read_bytes

JOURNAL = "journal.msgpack"
_CHECKSUM_BYTES = 8

T = TypeVar("T", bound=msgspec.Struct)


def free_place(out: str | Path) -> Path:
    """Resolve the path of an output folder, which must be missing or empty.

    Raises:
        OutputError: it is not empty, or no folder can be renamed to it.
    """
    folder = Path(os.path.realpath(out))
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{out} is not empty; choose another folder, or remove it")
    if folder.is_mount():
        raise OutputError(f"{out} is a mount point; choose a folder inside it")
    return folder


def refuse_inside(folder: Path, corpus: str | Path) -> None:
    """Refuse an output folder inside the corpus, since later builds would read it.

    Raises:
        OutputError: the folder is inside the corpus and not hidden.
    """
    place = Path(os.path.realpath(corpus))
    if not place.is_dir() or not folder.is_relative_to(place):
        return
    if not any(part.startswith(".") for part in folder.relative_to(place).parts):
        raise OutputError(
            f"{folder} lies in the corpus {corpus}, which the next build would read it with; "
            "choose a folder outside"
        )


@contextmanager
def work_folder(aside: Path, ours: re.Pattern[str]) -> Iterator[None]:
    """Lock the temporary folder for this process; on failure keep it only if it has a journal.

    Args:
        aside: the temporary folder.
        ours: pattern of the relative paths that the job writes.

    Raises:
        OutputError: another process uses it, it has other files, or it cannot be written.
    """
    with writing(aside):
        aside.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, aside)
        _refuse_foreign(aside, ours)
        try:
            with writing(aside):
                yield
        except BaseException as error:
            if (aside / JOURNAL).exists():
                error.add_note(f"what is done is kept in {aside}: the same command resumes there")
            else:
                shutil.rmtree(aside, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def save_journal(folder: Path, journal: msgspec.Struct) -> None:
    """Write the job's journal atomically.

    Raises:
        OutputError: the disk is full or the folder cannot be written.
    """
    content = msgspec.msgpack.encode(journal)
    sealed = xxhash.xxh3_64_intdigest(content).to_bytes(_CHECKSUM_BYTES, "little") + content
    write_file(folder / JOURNAL, sealed)


def load_journal(folder: Path, kind: type[T]) -> T | None:
    """Read the journal of an interrupted job; None if there is none.

    Raises:
        OutputError: the journal is damaged.
    """
    path = folder / JOURNAL
    if not os.path.lexists(path):
        return None
    content = read_bytes(path, error=OutputError)
    body = content[_CHECKSUM_BYTES:]
    try:
        if xxhash.xxh3_64_intdigest(body) != int.from_bytes(content[:_CHECKSUM_BYTES], "little"):
            raise ValueError("its checksum does not match")
        return msgspec.msgpack.decode(body, type=kind)
    except (ValueError, RecursionError) as error:
        raise OutputError(f"{path}: damaged ({error}); remove {folder} to build anew") from error


def _lock(descriptor: int, aside: Path) -> None:
    """Lock the folder, and check that its path still names it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(descriptor), aside.stat())
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:
        raise OutputError(
            f"another build is writing {aside}; wait for it, or choose another folder"
        )


def _refuse_foreign(aside: Path, ours: re.Pattern[str]) -> None:
    """Refuse a folder with files that are not the job's, since it may be deleted."""
    names = (str(path.relative_to(aside)) for path in aside.rglob("*"))
    foreign = sorted(name for name in names if not ours.fullmatch(name))
    if foreign:
        raise OutputError(
            f"{aside} holds {foreign[0]}, which no build wrote; move that folder away, or choose "
            "another place"
        )
