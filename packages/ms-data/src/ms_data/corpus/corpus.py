"""Reads the documents of a corpus one at a time, in a fixed order."""

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

from ms_data.corpus.file_kinds import HEAD_BYTES, NotText, detect_file_type, non_utf8_encoding
from ms_data.corpus.places import CorpusFile, RemoteFile, file_info, open_corpus_file
from ms_data.corpus.reader import TOO_LONG, Invalid, OpenFile, Reader, ReadOptions, ReadResult, Row
from ms_data.corpus.readers import READERS, reader_of
from ms_data.corpus.readers.json_lines import holds_rows
from ms_data.corpus.unpacking import COMPRESSIONS, decompress_blocks
from ms_data.errors import CorpusError, SettingError, TokenizerError


class Position(NamedTuple):
    """Reading position in a corpus."""

    file: int = 0
    """Number of files that are finished."""
    documents: int = 0
    """Number of documents of the current file that are finished, including skipped ones."""


class Document(NamedTuple):
    """One text, with the position after it."""

    text: str
    after: Position
    read_bytes: int
    """Bytes of the corpus read so far; for compressed files, compressed bytes."""
    columns: bytes = b""
    """The row's other columns as a JSON object; empty without columns, or if not requested."""


@frozen(kw_only=True)
class Corpus:
    """The files of a corpus and how to read them."""

    name: str
    """The corpus argument as the user wrote it, without credentials."""
    files: tuple[CorpusFile, ...]
    """Files in reading order."""
    names: tuple[str, ...] = field()
    """Paths of the files relative to the corpus folder; they identify a file across machines."""
    named: frozenset[CorpusFile] = frozenset()
    """Files that the user listed explicitly; these must be text."""
    reader: Reader | None = None
    """Reader for all files. None: choose by the name and first bytes of each file."""
    options: ReadOptions = field(factory=ReadOptions)
    sizes_bytes: tuple[int, ...] = field(init=False)
    """File sizes, in reading order."""

    @names.default
    def _default_names(self) -> tuple[str, ...]:
        return tuple(path.name for path in self.files)

    @sizes_bytes.default
    def _measure_sizes(self) -> tuple[int, ...]:
        return tuple(file_info(path).size_bytes for path in self.files)

    @property
    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(self.sizes_bytes)

    def files_digest(self, count: int) -> str:
        """Hash paths, sizes and modification times of the first `count` files (xxh3-128, hex)."""
        infos = [(path, file_info(path)) for path in self.files[:count]]
        # File names on Linux may be any bytes, not only UTF-8.
        return _digest(
            os.fsencode(str(path)) + f"\0{info.size_bytes} {info.version}\0".encode()
            for path, info in infos
        )

    @property
    def listing_digest(self) -> str:
        """Hash of the files' relative paths and sizes (xxh3-128, hex)."""
        sized = zip(self.names, self.sizes_bytes, strict=True)
        return _digest(os.fsencode(name) + f"\0{size}\0".encode() for name, size in sized)

    def content_digest(self) -> str:
        """Hash the content of all files, reading in parallel on all cores (xxh3-128, hex).

        A remote file is only read if its store reports no version (such as an ETag).
        """
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return _digest(pool.map(_file_checksum, self.files))

    def changed_since(self, time_ns: int) -> CorpusFile | None:
        """Return the first file that was, or may have been, modified after `time_ns`."""
        times = ((path, file_info(path).modified_ns) for path in self.files)
        return next((path for path, time in times if time is None or time > time_ns), None)

    def documents(
        self,
        start: Position = Position(),  # noqa: B008 - an immutable value
        on_skip: Callable[[str], None] = lambda reason: None,
        on_leave_out: Callable[[str], None] = lambda file_type: None,
        on_empty: Callable[[], None] = lambda: None,
    ) -> Iterator[Document]:
        """Yield the documents after `start`, in order. Empty texts are skipped.

        Args:
            start: position at which an earlier run stopped.
            on_skip: called with the reason for every invalid document, if `skip_invalid` is on.
            on_leave_out: called with the file type for every skipped file that is not text.
            on_empty: called for every row, line or file without text.

        Raises:
            CorpusError: a file cannot be read, a file that the user listed is not text, or a
                document is invalid and `skip_invalid` is off.
        """
        done_bytes = sum(self.sizes_bytes[: start.file])  # for the progress display
        for number in range(start.file, len(self.files)):
            path = self.files[number]
            skip = start.documents if number == start.file else 0
            for index, (item, read_bytes) in enumerate(self._read(number, skip), skip + 1):
                columns = b""
                if isinstance(item, Row):
                    if self.options.columns and self.options.parse is None:
                        item, columns = self._split_row(item)
                    else:
                        item = self._parse_row(item)
                if isinstance(item, NotText):
                    if path in self.named:
                        raise CorpusError(f"{path}: {item.name}, not text; {item.remedy}")
                    on_leave_out(item.name)
                elif isinstance(item, Invalid):
                    if not self.options.skip_invalid:
                        raise CorpusError(f"{item.reason}{self.options.skip_hint}")
                    on_skip(item.reason)
                elif item:
                    yield Document(item, Position(number, index), done_bytes + read_bytes, columns)
                else:
                    on_empty()
            done_bytes += self.sizes_bytes[number]

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of all tables; the options must have `parse` or `columns`.

        Raises:
            CorpusError: a file is not a table or cannot be read, or a row is invalid.
        """
        for number, path in enumerate(self.files):
            for item, _ in self._read(number, 0):
                if isinstance(item, Row):
                    yield item.values
                elif isinstance(item, Invalid):
                    raise CorpusError(item.reason)
                elif item:
                    name = item.name if isinstance(item, NotText) else "text"
                    raise CorpusError(f"{path}: {name}, not a table of rows; convert it")

    def _split_row(self, row: Row) -> tuple[str | Invalid, bytes]:
        """Return the text of a row, and its other columns as JSON."""
        columns = dict(row.values)
        name = self.options.text_column
        text = columns.pop(name, None)
        remedy = self.options.text_remedy
        if text is None:
            return Invalid(f"{row.location}: {name} is missing (null){remedy}"), b""
        if not isinstance(text, str):
            type_name = type(text).__name__
            return Invalid(f"{row.location}: {name} is {type_name}, not text{remedy}"), b""
        if len(text) > self.options.document_limit_bytes or (
            len(text.encode(errors="surrogatepass")) > self.options.document_limit_bytes
        ):
            return Invalid(f"{row.location}: {TOO_LONG}"), b""
        try:
            text.encode()
            return text, columns_json(columns) if columns else b""
        except (UnicodeError, ValueError, OverflowError, RecursionError) as error:
            return Invalid(f"{row.location}: a column cannot be written as JSON: {error}"), b""

    def _parse_row(self, row: Row) -> str | Invalid:
        """Convert a row to the text of a document."""
        assert self.options.parse is not None, "readers yield rows only on request"
        try:
            return self.options.parse(row.values)
        except TokenizerError as error:  # the template is wrong, so skipping the row does not help
            raise TokenizerError(f"{row.location}: {error}") from error
        except SettingError:  # no row can be read, for example because a library is missing
            raise
        except (ValueError, msgspec.MsgspecError) as error:
            return Invalid(f"{row.location}: {error}")
        except RecursionError:
            return Invalid(f"{row.location}: nested too deeply; fix the row")

    def _read(self, number: int, start: int) -> Iterator[tuple[ReadResult, int]]:
        """Yield the items of a file from index `start` on, with the number of bytes read so far."""
        path = self.files[number]
        try:
            with open_corpus_file(path) as raw:
                file = self._open_file(number, raw)
                if not isinstance(file, OpenFile):
                    yield from [(file, 0)][start:]
                    return
                for item in self._reader_of(file).documents(file, self.options, start):
                    yield item, raw.tell() if file.done_bytes is None else file.done_bytes
        except (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
            raise CorpusError(
                f"{path}: damaged compressed file ({error}); fetch or compress it again"
            ) from error
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _open_file(self, number: int, raw: BufferedReader) -> OpenFile | Invalid | NotText:
        """Detect the format and compression of a file from its name and first bytes."""
        path = self.files[number]
        suffix = path.suffix[1:].lower()
        name = path.stem if suffix in COMPRESSIONS else path.name
        # `peek` does not advance the file, so the readers see it from the start.
        detected = _detect_type(path, name, raw.peek(HEAD_BYTES))
        # Trust the suffix over the content: a damaged .gz must fail in decompression instead of
        # being read, or skipped, as something else.
        compression = suffix if suffix in COMPRESSIONS else detected
        if not isinstance(compression, str):
            return compression
        blocks = decompress_blocks(raw, compression)
        # The type is checked again after decompression.
        first = next(blocks, b"")
        inner_type = _detect_type(path, name, first)
        if inner_type:
            return (
                NotText("file compressed twice", "unpack it")
                if isinstance(inner_type, str)
                else inner_type
            )
        return OpenFile(
            path=path,
            name=name,
            head=first[:HEAD_BYTES],
            blocks=itertools.chain([first], blocks),
            raw=raw,
            size_bytes=self.sizes_bytes[number],
            compressed=bool(compression),
            named=path in self.named,
        )

    def _reader_of(self, file: OpenFile) -> Reader:
        reader = self.reader or reader_of(file.name, file.head)
        if reader is not None:
            return reader
        if holds_rows(file, self.options):
            return READERS["json_lines"]
        if self.options.parse is not None:
            raise CorpusError(
                f"{file.path}: must be JSON Lines, a JSON array of rows, or a table; write one "
                "row per line to a file that ends in .jsonl"
            )
        return READERS["text"]


def _detect_type(path: CorpusFile, name: str, head: bytes) -> str | Invalid | NotText:
    """Return a file's compression ("" for none), or the reason why it cannot be read as text."""
    head = head[:HEAD_BYTES]
    if reason := non_utf8_encoding(head):
        return Invalid(f"{path}: {reason}")
    return "" if reader_of(name, head) else detect_file_type(head)


def columns_json(columns: Mapping[str, Any]) -> bytes:
    """Encode columns as JSON; dates, decimals and bytes become strings."""
    try:
        return msgspec.json.encode(columns, enc_hook=str)
    except (OverflowError, msgspec.MsgspecError):  # an integer of more than 64 bits
        return json.dumps(columns, ensure_ascii=False, default=str).encode()


def _file_checksum(path: CorpusFile) -> bytes:
    if isinstance(path, RemoteFile) and path.info.version:
        return f"{path.url}\0{path.info.size_bytes} {path.info.version}".encode()
    try:
        with open_corpus_file(path) as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).digest()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error


def _digest(parts: Iterable[bytes]) -> str:
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
