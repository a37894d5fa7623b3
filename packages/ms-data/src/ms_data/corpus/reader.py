"""The reader interface, which `readers` implements per file format, and the types it exchanges."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from io import BufferedReader
from typing import Any, NamedTuple, Protocol

from attrs import define, field, frozen

from ms_data.corpus.file_kinds import BINARY, NotText, detect_file_type
from ms_data.corpus.places import CorpusFile
from ms_data.errors import CorpusError
from ms_data.settings.arguments import check_counts

DOCUMENT_LIMIT_MIB = 16
"""Default size limit of a document; tokenizing 16 MiB of text takes about 2 GB of memory."""

TOO_LONG = (
    "longer than the document limit; split it, or raise --document-limit-mib (tokenizing takes "
    "about 130 times the document's size in memory)"
)


class Invalid(NamedTuple):
    """Placeholder for a document that cannot be read."""

    reason: str


class Row(NamedTuple):
    """A table row, which the corpus converts to a document."""

    values: Mapping[str, Any]
    location: str
    """File and row number, for messages."""


ReadResult = str | Row | Invalid | NotText
"""A document, a row, or the reason why there is neither."""


@define
class OpenFile:
    """An open file of a corpus, which is read once."""

    path: CorpusFile
    name: str
    """File name without .gz or .zst."""
    head: bytes
    """First bytes, decompressed."""
    blocks: Iterator[bytes]
    """Decompressed content in order, in blocks of bounded size."""
    raw: BufferedReader
    """The underlying file, for formats with random access."""
    size_bytes: int
    """Size on disk."""
    compressed: bool = False
    """Whether the file is compressed, so that only `blocks` can be read."""
    named: bool = False
    """Whether the user listed the file explicitly; then it must be text."""
    done_bytes: int | None = None
    """Bytes read so far, if the reader knows better than the file position."""

    def read_all(self, limit: int) -> "bytes | Invalid":
        """Read the remaining content, up to `limit` bytes, as one document."""
        parts: list[bytes] = []
        for block in self.blocks:
            parts.append(block)
            # Stop at the limit, without decompressing the remainder.
            limit -= len(block)
            if limit < 0:
                return Invalid(f"{self.path}: {TOO_LONG}")
        return b"".join(parts)


@frozen(kw_only=True)
class ReadOptions:
    """Options for reading documents."""

    text_column: str = "text"
    """Column or JSON key with the text of a row."""
    skip_invalid: bool = False
    """Skip invalid documents instead of stopping."""
    skip_hint: str = "; or skip invalid documents with `ms-data build --skip-invalid`"
    """End of an error message that says how to skip invalid documents."""
    parse: Callable[[Mapping[str, Any]], str] | None = None
    """Converts a row to text, or raises ValueError. None: use `text_column`."""
    columns: bool = False
    """Return the other columns of a row with its text."""
    document_limit_mib: int = field(default=DOCUMENT_LIMIT_MIB)
    """Longer documents and rows are invalid."""

    @document_limit_mib.validator
    def _at_least_one(self, _: object, value: int) -> None:
        check_counts(document_limit_mib=value)

    @property
    def rows(self) -> bool:
        """Whether table readers yield rows instead of texts."""
        return self.columns or self.parse is not None

    @property
    def document_limit_bytes(self) -> int:
        """Document limit in bytes."""
        return self.document_limit_mib << 20

    @property
    def text_remedy(self) -> str:
        """End of a message about a row without text; empty if rows are parsed."""
        return "" if self.parse else "; name the text column with --text-column"


class Reader(Protocol):
    """Reader of one file format."""

    def claims(self, name: str, head: bytes, /) -> bool:
        """Return whether this reader handles a file, by its uncompressed name and first bytes."""
        ...

    def documents(
        self, file: OpenFile, options: ReadOptions, start: int, /
    ) -> Iterator[ReadResult]:
        """Yield the items of a file in order, from index `start` on.

        An empty text is not a document, but it counts as an item.
        """
        ...


@frozen(kw_only=True)
class FileReader:
    """Reader that claims files by suffix or magic bytes."""

    documents: Callable[[OpenFile, ReadOptions, int], Iterator[ReadResult]]
    suffixes: tuple[str, ...] = ()
    """File name suffixes."""
    signatures: tuple[bytes, ...] = ()
    """Magic bytes; they match under any file name."""
    text: bool = True
    """Whether the format is text; a file detected as something else is not claimed then."""
    refuses_nul: bool = False
    """Whether the reader rejects NUL bytes itself; files that contain some are then claimed."""

    def claims(self, name: str, head: bytes, /) -> bool:
        """Return whether a file has this format."""
        # A text may start with the letters of a binary format's magic, but has no NUL bytes.
        if head.startswith(self.signatures) and (self.text or b"\0" in head):
            return True
        if not name.lower().endswith(self.suffixes):
            return False
        file_type = detect_file_type(head) if self.text else ""
        return file_type == "" or (self.refuses_nul and file_type == BINARY)


def import_library(name: str, extra: str, file: OpenFile) -> Any:
    """Import an optional library.

    Raises:
        CorpusError: the library is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise CorpusError(
            f"{file.path}: reading it needs {name.partition('.')[0]}; "
            f"pip install 'ms-data[{extra}]'"
        ) from error


def damaged_file(file: OpenFile, format_name: str, problem: object) -> CorpusError:
    """Return the error for a damaged file."""
    reason = " ".join(str(problem).split()) or type(problem).__name__
    return CorpusError(
        f"{file.path}: damaged {format_name} ({reason[:200]}); download or write the file again"
    )


def utf8_problem(content: bytes) -> str | None:
    """Return why `content` is not UTF-8, or None if it is."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        return f"not UTF-8: byte 0x{byte:02x} at offset {error.start}; convert the file to UTF-8"
    return None
