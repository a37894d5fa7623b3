"""Writes series of compressed files; a resumed writer checks all earlier bytes."""

import hashlib
import os
from io import FileIO
from pathlib import Path

import msgspec
import xxhash

from ms_data.errors import OutputError
from ms_data.files.durable import sync_folder, write_all

_READ_BYTES = 1 << 20


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a series, possibly unfinished."""

    name: str
    size_bytes: int
    checksum: str
    """xxh3-128 of its bytes, hexadecimal."""


def file_entry(folder: Path, name: str) -> FileEntry:
    """Return the entry of a finished file."""
    path = folder / name
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    return FileEntry(name=name, size_bytes=path.stat().st_size, checksum=checksum)


class SeriesWriter:
    """Writes `part-00000.jsonl.zst` and its successors in one folder.

    A file is closed at the first frame end past the size limit, so the same frames always give the
    same files.
    """

    def __init__(
        self,
        parent: Path,
        folder: str,
        *,
        shard_size_bytes: int,
        entries: tuple[FileEntry, ...] = (),
    ) -> None:
        self._parent = parent
        self._folder = folder
        self._shard_size_bytes = shard_size_bytes
        self._done: list[FileEntry] = []
        self._file: FileIO | None = None
        self._size = 0
        self._hasher = xxhash.xxh3_128()
        (parent / folder).mkdir(exist_ok=True)
        # All files are checked before the first one is changed.
        for entry, hasher in [(entry, self._verify(entry)) for entry in entries]:
            self._resume(entry, hasher)

    def write(self, frame: bytes) -> None:
        """Write one frame, which may be empty."""
        if not frame:
            return
        if self._file is None:
            path = self._parent / self._next_name
            self._file = path.open("wb", buffering=0)
            self._size, self._hasher = 0, xxhash.xxh3_128()
        write_all(self._file, frame)
        self._size += len(frame)
        self._hasher.update(frame)
        # Compressed sizes are deterministic, so files split at the same frames after a resume.
        if self._size >= self._shard_size_bytes:
            self._close()

    def sync(self) -> tuple[FileEntry, ...]:
        """Sync the output to disk, and return its files."""
        unfinished = () if self._file is None else (self._entry(),)
        if self._file is not None:
            os.fsync(self._file.fileno())
        # The name of a new file must survive a power cut too.
        sync_folder(self._parent / self._folder)
        return (*self._done, *unfinished)

    def finish(self) -> tuple[FileEntry, ...]:
        """Close the series and return its files."""
        if self._file is not None:
            self._close()
        return self.sync()

    def abandon(self) -> None:
        """Close an open file without finishing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _next_name(self) -> str:
        return f"{self._folder}/part-{len(self._done):05d}.jsonl.zst"

    def _entry(self) -> FileEntry:
        return FileEntry(
            name=self._next_name, size_bytes=self._size, checksum=self._hasher.hexdigest()
        )

    def _close(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        self._done.append(self._entry())
        self._file = None

    def _verify(self, entry: FileEntry) -> xxhash.xxh3_128:
        """Check all bytes of an earlier file; return the hash state for appending."""
        path = self._parent / entry.name
        hasher, remaining = xxhash.xxh3_128(), entry.size_bytes
        if path.is_file():
            with path.open("rb") as file:
                while block := file.read(min(remaining, _READ_BYTES)):
                    hasher.update(block)
                    remaining -= len(block)
        if remaining or hasher.hexdigest() != entry.checksum:
            raise OutputError(f"{path}: damaged; remove {self._parent} to start over")
        return hasher

    def _resume(self, entry: FileEntry, hasher: xxhash.xxh3_128) -> None:
        """Continue an earlier file."""
        if entry.size_bytes >= self._shard_size_bytes:
            self._done.append(entry)
            return
        self._file = (self._parent / entry.name).open("r+b", buffering=0)
        # Frames after the last saved progress are removed, as they will be written again.
        self._file.truncate(entry.size_bytes)
        self._file.seek(entry.size_bytes)
        self._size, self._hasher = entry.size_bytes, hasher
