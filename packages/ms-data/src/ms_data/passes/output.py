"""Writes series of packed files so that a killed writer can go on, every earlier byte checked."""

import hashlib
import json
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import xxhash
import zstandard

from ms_data.errors import OutputError
from ms_data.files.durable import sync_folder, write_all

_READ_BYTES = 1 << 20
LEVEL = 3
"""Compression level of zstd."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a series, as far as it is written."""

    name: str
    size_bytes: int
    checksum: str
    """Hexadecimal xxh3-128 of its bytes."""


def line_of(text: str, place: str, columns: bytes) -> bytes:
    """Write a document that was kept as JSON: `text`, `id`, and the other columns of its row.

    `id` is the file's name in the corpus and the document's number in it. A row's own `text` and
    `id` become `source_text` and `source_id`, unless it has these already.
    """
    line: dict[str, Any] = {"text": text, "id": place}
    if columns:
        others: dict[str, Any] = json.loads(columns)
        for name in line:
            if name in others:
                others.setdefault(f"source_{name}", others.pop(name))
        return json.dumps(line | others, ensure_ascii=False, separators=(",", ":")).encode()
    return msgspec.json.encode(line)


def packed(lines: Sequence[bytes]) -> bytes:
    """Compress lines to one frame of zstd; empty where there are none."""
    if not lines:
        return b""
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(
        b"\n".join((*lines, b""))
    )


def entry_of(home: Path, name: str) -> FileEntry:
    """Return the entry of a file that is written."""
    path = home / name
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    return FileEntry(name=name, size_bytes=path.stat().st_size, checksum=checksum)


class SeriesWriter:
    """Writes `part-00000.jsonl.zst` and its followers in one folder.

    A file is closed at the first frame end past the size, so that the same frames always give the
    same files.
    """

    def __init__(
        self, home: Path, folder: str, *, shard_size_bytes: int, entries: tuple[FileEntry, ...] = ()
    ) -> None:
        self._home = home
        self._folder = folder
        self._shard_size_bytes = shard_size_bytes
        self._done: list[FileEntry] = []
        self._file: FileIO | None = None
        self._size = 0
        self._seen = xxhash.xxh3_128()
        (home / folder).mkdir(exist_ok=True)
        for entry, seen in [(entry, self._checked(entry)) for entry in entries]:
            self._resume(entry, seen)

    def write(self, frame: bytes) -> None:
        """Write one frame, which may be empty."""
        if not frame:
            return
        if self._file is None:
            path = self._home / self._next_name
            self._file = path.open("wb", buffering=0)
            self._size, self._seen = 0, xxhash.xxh3_128()
        write_all(self._file, frame)
        self._size += len(frame)
        self._seen.update(frame)
        if self._size >= self._shard_size_bytes:
            self._close()

    def sync(self) -> tuple[FileEntry, ...]:
        """Make all that was written durable, and say what it is."""
        open_one = () if self._file is None else (self._entry(),)
        if self._file is not None:
            os.fsync(self._file.fileno())
        sync_folder(self._home / self._folder)
        return (*self._done, *open_one)

    def finish(self) -> tuple[FileEntry, ...]:
        """Close the series."""
        if self._file is not None:
            self._close()
        return self.sync()

    def abandon(self) -> None:
        """Close the file that is open, if one is."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _next_name(self) -> str:
        return f"{self._folder}/part-{len(self._done):05d}.jsonl.zst"

    def _entry(self) -> FileEntry:
        return FileEntry(
            name=self._next_name, size_bytes=self._size, checksum=self._seen.hexdigest()
        )

    def _close(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        self._done.append(self._entry())
        self._file = None

    def _checked(self, entry: FileEntry) -> xxhash.xxh3_128:
        """Check every byte of a file that was written before."""
        path = self._home / entry.name
        seen, left = xxhash.xxh3_128(), entry.size_bytes
        if path.is_file():
            with path.open("rb") as file:
                while block := file.read(min(left, _READ_BYTES)):
                    seen.update(block)
                    left -= len(block)
        if left or seen.hexdigest() != entry.checksum:
            raise OutputError(f"{path}: damaged; remove {self._home} to build anew")
        return seen

    def _resume(self, entry: FileEntry, seen: xxhash.xxh3_128) -> None:
        """Take over a file that was written before."""
        if entry.size_bytes >= self._shard_size_bytes:
            self._done.append(entry)
            return
        self._file = (self._home / entry.name).open("r+b", buffering=0)
        self._file.truncate(entry.size_bytes)
        self._file.seek(entry.size_bytes)
        self._size, self._seen = entry.size_bytes, seen
