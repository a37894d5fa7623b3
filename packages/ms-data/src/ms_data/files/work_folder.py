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


def resolve_output(out: str | Path) -> Path:
    """Resolve the path of an output folder, which must be missing or empty.

    Raises:
        OutputError: it is not empty, or no folder can be renamed to it.
    """
    folder = Path(os.path.realpath(out))
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{out} is not empty; choose another folder, or remove it")
    if folder.is_mount():  # nothing can be renamed to it
        raise OutputError(f"{out} is a mount point; choose a folder inside it")
    return folder


def check_outside_corpus(folder: Path, corpus: str | Path) -> None:
    """Refuse an output folder inside the corpus, since later builds would read it.

    Raises:
        OutputError: the folder is inside the corpus and not hidden.
    """
    corpus_path = Path(os.path.realpath(corpus))
    if not corpus_path.is_dir() or not folder.is_relative_to(corpus_path):
        return
    if not any(part.startswith(".") for part in folder.relative_to(corpus_path).parts):
        raise OutputError(
            f"{folder} is inside the corpus {corpus}, so the next build would read it; use a "
            "folder outside the corpus"
        )


@contextmanager
def work_folder(folder: Path, expected_files: re.Pattern[str]) -> Iterator[None]:
    """Lock the temporary folder for this process; on failure keep it only if it has a journal.

    Args:
        folder: the temporary folder.
        expected_files: pattern of the relative paths that the job writes.

    Raises:
        OutputError: another process uses it, it has other files, or it cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder)
        _check_expected_files(folder, expected_files)
        try:
            with writing(folder):
                yield
        except BaseException as error:
            # Without a journal, nothing could be resumed.
            if (folder / JOURNAL).exists():
                error.add_note(f"progress is saved in {folder}; the same command resumes there")
            else:
                shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def save_journal(folder: Path, journal: msgspec.Struct) -> None:
    """Write the job's journal atomically.

    Raises:
        OutputError: the disk is full or the folder cannot be written.
    """
    content = msgspec.msgpack.encode(journal)
    checksummed = xxhash.xxh3_64_intdigest(content).to_bytes(_CHECKSUM_BYTES, "little") + content
    write_file(folder / JOURNAL, checksummed)


def load_journal(folder: Path, struct_type: type[T]) -> T | None:
    """Read the journal of an interrupted job; None if the file is missing.

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
            raise ValueError("checksum mismatch")
        return msgspec.msgpack.decode(body, type=struct_type)
    except (ValueError, RecursionError) as error:
        raise OutputError(f"{path}: damaged ({error}); remove {folder} to rebuild") from error


def _lock(descriptor: int, folder: Path) -> None:
    """Lock the folder, and check that its path still names it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have renamed or removed the folder while we waited to open it.
        same = os.path.samestat(os.fstat(descriptor), folder.stat())
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:
        raise OutputError(f"another build is writing {folder}; wait for it, or use another folder")


def _check_expected_files(folder: Path, expected_files: re.Pattern[str]) -> None:
    """Refuse a folder with files that are not the job's, since it may be deleted."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    unexpected = sorted(name for name in names if not expected_files.fullmatch(name))
    if unexpected:
        raise OutputError(
            f"{folder} holds {unexpected[0]}, which no build wrote; move that folder away, or use "
            "another output folder"
        )
