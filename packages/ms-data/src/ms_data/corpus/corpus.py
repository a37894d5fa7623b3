"""Reads the documents of a corpus's files, one at a time, in one fixed order."""

import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from typing import Any, NamedTuple

import msgspec
import xxhash
import zstandard
from attrs import field, frozen

from ms_data.corpus.file_kinds import HEAD_BYTES, NotText, foreign_encoding, kind_of
from ms_data.corpus.places import Place, RemoteFile, file_info, open_place
from ms_data.corpus.reader import TOO_LONG, Found, Invalid, OpenFile, Reader, ReadOptions, Row
from ms_data.corpus.readers import READERS, reader_of
from ms_data.corpus.readers.json_lines import holds_rows
from ms_data.corpus.unpacking import PACKINGS, unpacked
from ms_data.errors import CorpusError, SettingError, TokenizerError


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
    columns: bytes = b""
    """The other columns of its row as a JSON object, where they are asked for and there are any."""


@frozen(kw_only=True)
class Corpus:
    """The files to read and how."""

    name: str
    """What the user typed."""
    files: tuple[Place, ...]
    """In the order of reading."""
    names: tuple[str, ...] = field()
    """What each is called below the folder that was named, by which another build knows it."""
    named: frozenset[Place] = frozenset()
    """The files that were named themselves, so that they must be text."""
    reader: Reader | None = None
    """Reads every file; None chooses one for each file by its name and first bytes."""
    options: ReadOptions = field(factory=ReadOptions)
    sizes_bytes: tuple[int, ...] = field(init=False)
    """Size of each file."""

    @names.default
    def _own_names(self) -> tuple[str, ...]:
        return tuple(path.name for path in self.files)

    @sizes_bytes.default
    def _measure(self) -> tuple[int, ...]:
        return tuple(file_info(path).size_bytes for path in self.files)

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(self.sizes_bytes)

    def identity(self, count: int) -> str:
        """Compute the hexadecimal xxh3-128 of the first `count` files' names, sizes and times."""
        facts = [(path, file_info(path)) for path in self.files[:count]]
        # A name need not be UTF-8.
        return _digest(
            os.fsencode(str(path)) + f"\0{one.size_bytes} {one.version}\0".encode()
            for path, one in facts
        )

    @property
    def listing(self) -> str:
        """Hexadecimal xxh3-128 of the files' names below their folders and their sizes."""
        sized = zip(self.names, self.sizes_bytes, strict=True)
        return _digest(os.fsencode(name) + f"\0{size}\0".encode() for name, size in sized)

    def content(self) -> str:
        """Compute the hexadecimal xxh3-128 of every byte of every file, read on all cores.

        A file that lies elsewhere is read only where its place tells no version of it.
        """
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return _digest(pool.map(_checksum_of, self.files))

    def changed_since(self, time_ns: int) -> Place | None:
        """Find the first file that was written after `time_ns`, as far as is known."""
        times = ((path, file_info(path).modified_ns) for path in self.files)
        return next((path for path, time in times if time is None or time > time_ns), None)

    def documents(
        self,
        start: Position = Position(),  # noqa: B008 - an immutable value
        on_skip: Callable[[str], None] = lambda reason: None,
        on_leave_out: Callable[[str], None] = lambda kind: None,
        on_empty: Callable[[], None] = lambda: None,
    ) -> Iterator[Document]:
        """Read the documents after `start`; texts that are empty are passed over.

        Args:
            start: where an earlier reading stopped.
            on_skip: called with the reason for each document that is not valid text, if
                `skip_invalid` is on.
            on_leave_out: called for each file of a folder that is no text with what it is.
            on_empty: called for each row, line or file that is there and holds no text.

        Raises:
            CorpusError: a file cannot be read, the one that was named is no text, or a document
                is not valid text and `skip_invalid` is off.
        """
        done_bytes = sum(self.sizes_bytes[: start.file])
        for number in range(start.file, len(self.files)):
            path = self.files[number]
            skip = start.documents if number == start.file else 0
            for nth, (found, read_bytes) in enumerate(self._read(number, skip), skip + 1):
                columns = b""
                if isinstance(found, Row):
                    if self.options.columns and self.options.parse is None:
                        found, columns = self._with_columns(found)
                    else:
                        found = self._text_of(found)
                if isinstance(found, NotText):
                    if path in self.named:
                        raise CorpusError(
                            f"{path}: {found.name}, which is not read as text; {found.remedy}"
                        )
                    on_leave_out(found.name)
                elif isinstance(found, Invalid):
                    if not self.options.skip_invalid:
                        raise CorpusError(f"{found.reason}{self.options.or_leave_out}")
                    on_skip(found.reason)
                elif found:
                    yield Document(found, Position(number, nth), done_bytes + read_bytes, columns)
                else:
                    on_empty()
            done_bytes += self.sizes_bytes[number]

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Read the rows of all tables, whose options must have `parse` or `columns`.

        Raises:
            CorpusError: a file is not a table or cannot be read, or a row is invalid.
        """
        for number, path in enumerate(self.files):
            for found, _ in self._read(number, 0):
                if isinstance(found, Row):
                    yield found.values
                elif isinstance(found, Invalid):
                    raise CorpusError(found.reason)
                elif found:
                    name = found.name if isinstance(found, NotText) else "text"
                    raise CorpusError(f"{path}: {name}, not a table of rows; convert it")

    def _with_columns(self, row: Row) -> tuple[str | Invalid, bytes]:
        """Take the text of a row, and its other columns as JSON."""
        others = dict(row.values)
        name = self.options.text_column
        text = others.pop(name, None)
        remedy = self.options.text_remedy
        if text is None:
            return Invalid(f"{row.place}: {name} is missing (null){remedy}"), b""
        if not isinstance(text, str):
            kind = type(text).__name__
            return Invalid(f"{row.place}: {name} is {kind}, not text{remedy}"), b""
        if len(text) > self.options.document_limit_bytes or (
            len(text.encode(errors="surrogatepass")) > self.options.document_limit_bytes
        ):
            return Invalid(f"{row.place}: {TOO_LONG}"), b""
        try:
            text.encode()
            return text, json_of(others) if others else b""
        except (UnicodeError, ValueError, OverflowError, RecursionError) as error:
            return Invalid(f"{row.place}: a column cannot be written as JSON: {error}"), b""

    def _text_of(self, row: Row) -> str | Invalid:
        """Make the document of a row."""
        assert self.options.parse is not None, "readers give rows where they are asked for"
        try:
            return self.options.parse(row.values)
        except TokenizerError as error:  # of the template, not of the row: nothing to leave out
            raise TokenizerError(f"{row.place}: {error}") from error
        except SettingError:  # a library that is not installed, say: no row can be read
            raise
        except (ValueError, msgspec.MsgspecError) as error:
            return Invalid(f"{row.place}: {error}")
        except RecursionError:
            return Invalid(f"{row.place}: it is nested too deeply; mend the row")

    def _read(self, number: int, start: int) -> Iterator[tuple[Found, int]]:
        """Read what a file holds from number `start` on, with its bytes read so far."""
        path = self.files[number]
        try:
            with open_place(path) as raw:
                file = self._opened(number, raw)
                if not isinstance(file, OpenFile):
                    yield from [(file, 0)][start:]
                    return
                for found in self._reader_of(file).documents(file, self.options, start):
                    yield found, raw.tell() if file.done_bytes is None else file.done_bytes
        except (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
            raise CorpusError(
                f"{path}: damaged compressed file ({error}); fetch or compress it again"
            ) from error
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _opened(self, number: int, raw: BufferedReader) -> OpenFile | Invalid | NotText:
        """Find out what a file is, as far as its first bytes tell it."""
        path = self.files[number]
        suffix = path.suffix[1:].lower()
        name = path.stem if suffix in PACKINGS else path.name
        kind = _look(path, name, raw.peek(HEAD_BYTES))
        # What is said to be packed, and is not, would otherwise be read, or left out as no text.
        packing = suffix if suffix in PACKINGS else kind
        if not isinstance(packing, str):
            return packing
        blocks = unpacked(raw, packing)
        first = next(blocks, b"")
        inner = _look(path, name, first)
        if inner:
            return NotText("file packed twice", "unpack it") if isinstance(inner, str) else inner
        return OpenFile(
            path=path,
            name=name,
            head=first[:HEAD_BYTES],
            blocks=itertools.chain([first], blocks),
            raw=raw,
            size_bytes=self.sizes_bytes[number],
            packed=bool(packing),
            named=path in self.named,
        )

    def _reader_of(self, file: OpenFile) -> Reader:
        found = self.reader or reader_of(file.name, file.head)
        if found is not None:
            return found
        if holds_rows(file, self.options):
            return READERS["json_lines"]
        if self.options.parse is not None:
            raise CorpusError(
                f"{file.path}: it must be JSON Lines, a JSON array of rows, or a table; write one "
                "row per line to a file that ends in .jsonl"
            )
        return READERS["text"]


def _look(path: Place, name: str, head: bytes) -> str | Invalid | NotText:
    """Say how a file that begins with `head` is packed, "" if not; or why it is not read."""
    head = head[:HEAD_BYTES]
    if reason := foreign_encoding(head):
        return Invalid(f"{path}: {reason}")
    return "" if reader_of(name, head) else kind_of(head)


def json_of(columns: Mapping[str, Any]) -> bytes:
    """Write columns as JSON; dates, decimals and bytes as text."""
    try:
        return msgspec.json.encode(columns, enc_hook=str)
    except (OverflowError, msgspec.MsgspecError):  # a whole number of more than 64 bits
        return json.dumps(columns, ensure_ascii=False, default=str).encode()


def _checksum_of(path: Place) -> bytes:
    if isinstance(path, RemoteFile) and path.facts.version:
        return f"{path.url}\0{path.facts.size_bytes} {path.facts.version}".encode()
    try:
        with open_place(path) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).digest()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error


def _digest(parts: Iterable[bytes]) -> str:
    seen = xxhash.xxh3_128()
    for part in parts:
        seen.update(part)
    return seen.hexdigest()
