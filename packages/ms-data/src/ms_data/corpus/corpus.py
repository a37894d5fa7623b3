"""Reads the documents of a corpus's files, one at a time, in one fixed order."""

import gzip
import hashlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import xxhash
import zstandard
from attrs import field, frozen

from ms_data.corpus.file_kinds import HEAD_BYTES, NotText, foreign_encoding, kind_of
from ms_data.corpus.reader import Found, Invalid, OpenFile, Reader, ReadOptions
from ms_data.corpus.readers import READERS, reader_of
from ms_data.corpus.unpacking import PACKINGS, unpacked
from ms_data.errors import CorpusError


class Position(NamedTuple):
    """How far a corpus has been read."""

    file: int = 0
    """Files before this one are done."""
    documents: int = 0
    """Documents, skipped ones included, done of this file."""


class Document(NamedTuple):
    """One text and where the next one starts."""

    text: str
    after: Position
    read_bytes: int
    """Bytes of the corpus read so far, compressed ones as they lie on disk."""


@frozen(kw_only=True)
class Corpus:
    """The files to read and how."""

    name: str
    """What the user typed."""
    files: tuple[Path, ...]
    """In the order of reading."""
    root: Path = Path()
    """The folder that all files lie in."""
    reader: Reader | None = None
    """Reads every file; None takes the one that the file's name and first bytes tell."""
    options: ReadOptions = field(factory=ReadOptions)
    sizes_bytes: tuple[int, ...] = field(init=False)
    """Size of each file."""

    @sizes_bytes.default
    def _measure(self) -> tuple[int, ...]:
        return tuple(path.stat().st_size for path in self.files)

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(self.sizes_bytes)

    def identity(self, count: int) -> str:
        """Hexadecimal xxh3-128 of the names, sizes and times of the first `count` files."""
        facts = [(path, path.stat()) for path in self.files[:count]]
        # A name need not be UTF-8.
        return _digest(
            os.fsencode(path) + f"\0{one.st_size} {one.st_mtime_ns}\0".encode()
            for path, one in facts
        )

    @property
    def listing(self) -> str:
        """Hexadecimal xxh3-128 of the files' names below the root and their sizes."""
        names = (os.fsencode(os.path.relpath(path, self.root)) for path in self.files)
        sized = zip(names, self.sizes_bytes, strict=True)
        return _digest(name + f"\0{size}\0".encode() for name, size in sized)

    def content(self) -> str:
        """Hexadecimal xxh3-128 of every byte of every file; reads them all, on all cores."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return _digest(pool.map(_checksum_of, self.files))

    def changed_since(self, time_ns: int) -> Path | None:
        """Finds the first file that was written after `time_ns`, if there is one."""
        return next((path for path in self.files if path.stat().st_mtime_ns > time_ns), None)

    def documents(
        self,
        start: Position = Position(),  # noqa: B008 - an immutable value
        on_skip: Callable[[str], None] = lambda reason: None,
        on_leave_out: Callable[[str], None] = lambda kind: None,
    ) -> Iterator[Document]:
        """Reads the documents after `start`; texts that are empty are passed over.

        Args:
            start: where an earlier reading stopped.
            on_skip: called with the reason for each document that is not valid text, if
                `skip_invalid` is on.
            on_leave_out: called for each file of a folder that is no text with what it is.

        Raises:
            CorpusError: a file cannot be read, the one that was named is no text, or a document
                is not valid text and `skip_invalid` is off.
        """
        done_bytes = sum(self.sizes_bytes[: start.file])
        for number in range(start.file, len(self.files)):
            path = self.files[number]
            skip = start.documents if number == start.file else 0
            for nth, (found, read_bytes) in enumerate(self._read(path), 1):
                if nth <= skip:
                    continue
                if isinstance(found, NotText):
                    if self.options.named:
                        raise CorpusError(
                            f"{path}: {found.name}, which is not read as text; {found.remedy}"
                        )
                    on_leave_out(found.name)
                elif isinstance(found, Invalid):
                    if not self.options.skip_invalid:
                        raise CorpusError(f"{found.reason}, or leave it out with --skip-invalid")
                    on_skip(found.reason)
                elif found:
                    yield Document(found, Position(number, nth), done_bytes + read_bytes)
            done_bytes += self.sizes_bytes[number]

    def _read(self, path: Path) -> Iterator[tuple[Found, int]]:
        """Reads each document of a file, with the bytes of the file read so far."""
        try:
            with path.open("rb") as raw:
                for found in self._found(path, raw):
                    yield found, raw.tell()
        except (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
            raise CorpusError(
                f"{path}: damaged compressed file ({error}); fetch or compress it again"
            ) from error
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _found(self, path: Path, raw: BufferedReader) -> Iterator[Found]:
        suffix = path.suffix[1:]
        name = path.stem if suffix in PACKINGS else path.name
        kind = _look(path, raw.peek(HEAD_BYTES))
        if not isinstance(kind, str):
            yield kind
            return
        # What is said to be packed, and is not, would otherwise be read.
        blocks = unpacked(raw, suffix if suffix in PACKINGS else kind)
        first = next(blocks, b"")
        inner = _look(path, first)
        if inner:
            yield NotText("file packed twice", "unpack it") if isinstance(inner, str) else inner
            return
        reader = self.reader or reader_of(name, first)
        if self.options.parse is not None and not reader.rows:
            raise CorpusError(
                f"{path}: not JSON Lines; give files that end in .jsonl with a row a line "
                "(an array becomes that with `jq -c '.[]'`)"
            )
        file = OpenFile(path, name, itertools.chain([first], blocks), raw)
        yield from reader.documents(file, self.options)


def _look(path: Path, head: bytes) -> str | Invalid | NotText:
    """Says how a file that begins with `head` is packed, "" if not; or why it is not read."""
    if reason := foreign_encoding(head):
        return Invalid(f"{path}: {reason}")
    if any(head.startswith(reader.signatures) for reader in READERS.values()):
        return ""
    return kind_of(head[:HEAD_BYTES])


def _checksum_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).digest()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error


def _digest(parts: Iterable[bytes]) -> str:
    seen = xxhash.xxh3_128()
    for part in parts:
        seen.update(part)
    return seen.hexdigest()
