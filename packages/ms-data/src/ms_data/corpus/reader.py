"""Defines readers, which give the documents of one kind of file; `readers` holds them."""

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from io import BufferedReader
from typing import Any, NamedTuple, Protocol

from attrs import define, field, frozen

from ms_data.corpus.file_kinds import BINARY, NotText, kind_of
from ms_data.corpus.places import Place
from ms_data.errors import CorpusError
from ms_data.settings.arguments import check_counts

DOCUMENT_LIMIT_MIB = 16
"""A document of text of this size takes some 2 GB while it is tokenized."""

TOO_LONG = (
    "longer than the largest document that is read; split it, or raise --document-limit-mib, for "
    "some 130 times as much memory"
)


class Invalid(NamedTuple):
    """Stands in for a document that cannot be read."""

    reason: str


class Row(NamedTuple):
    """A row of a table, of which the corpus makes a document."""

    values: Mapping[str, Any]
    place: str
    """Where it stands, for messages."""


Found = str | Row | Invalid | NotText
"""A document, or why there is none."""


@define
class OpenFile:
    """One file of a corpus, to be read once."""

    path: Place
    name: str
    """Its name, without .gz or .zst."""
    head: bytes
    """Its first bytes, unpacked."""
    blocks: Iterator[bytes]
    """Its content in order, unpacked, in blocks of bounded size."""
    raw: BufferedReader
    """The file itself, for formats that are not read in order."""
    size_bytes: int
    """As it lies on disk."""
    packed: bool = False
    """The file itself is packed, so that only its blocks can be read."""
    named: bool = False
    """Whether the user named it, so that it must be text."""
    done_bytes: int | None = None
    """How much is read, where the reader knows better than the place in the file tells."""

    def whole(self, limit: int) -> "bytes | Invalid":
        """Read a file that is one document of at most `limit` bytes."""
        parts: list[bytes] = []
        for block in self.blocks:
            parts.append(block)
            limit -= len(block)
            if limit < 0:
                return Invalid(f"{self.path}: {TOO_LONG}")
        return b"".join(parts)


@frozen(kw_only=True)
class ReadOptions:
    """How documents are read."""

    text_column: str = "text"
    """The member or column of a row that holds the text."""
    skip_invalid: bool = False
    """Leave out what cannot be read instead of stopping."""
    or_leave_out: str = "; or leave out what is invalid with `ms-data build --skip-invalid`"
    """How what cannot be read may be left out, for the message of one that stops."""
    parse: Callable[[Mapping[str, Any]], str] | None = None
    """Makes a document's text of a row, or raises ValueError; None takes `text_column`."""
    columns: bool = False
    """Give each row's other columns with its text."""
    document_limit_mib: int = field(default=DOCUMENT_LIMIT_MIB)
    """A longer document, or row, is not valid."""

    @document_limit_mib.validator
    def _at_least_one(self, _: object, value: int) -> None:
        check_counts(document_limit_mib=value)

    @property
    def rows(self) -> bool:
        """Whether readers of tables give rows instead of texts."""
        return self.columns or self.parse is not None

    @property
    def document_limit_bytes(self) -> int:
        """The limit in bytes."""
        return self.document_limit_mib << 20

    @property
    def text_remedy(self) -> str:
        """What to do about a row without its text; empty where the text is not one column."""
        return "" if self.parse else "; name the text's column with --text-column"


class Reader(Protocol):
    """Reads one kind of file."""

    def claims(self, name: str, head: bytes, /) -> bool:
        """Return whether a file is of this kind, by its unpacked name and its first bytes."""
        ...

    def documents(self, file: OpenFile, options: ReadOptions, start: int, /) -> Iterator[Found]:
        """Yield what is found in a file, in order, from number `start` on.

        An empty text is passed over, but counts as a number.
        """
        ...


@frozen(kw_only=True)
class FileReader:
    """A reader of the files that end, or begin, in one of some ways."""

    documents: Callable[[OpenFile, ReadOptions, int], Iterator[Found]]
    suffixes: tuple[str, ...] = ()
    """How the names of its files end."""
    signatures: tuple[bytes, ...] = ()
    """How its files begin, whatever their names."""
    text: bool = True
    """Whether its files are text, so that a file known to be something else is not claimed."""
    refuses_nul: bool = False
    """Whether its reader refuses NUL bytes itself, so that files that hold some are claimed."""

    def claims(self, name: str, head: bytes, /) -> bool:
        """Return whether a file is of this kind."""
        if head.startswith(self.signatures) and (self.text or b"\0" in head):
            return True
        if not name.lower().endswith(self.suffixes):
            return False
        kind = kind_of(head) if self.text else ""
        return kind == "" or (self.refuses_nul and kind == BINARY)


def library(name: str, extra: str, file: OpenFile) -> Any:
    """Import a library that an extra brings.

    Raises:
        CorpusError: it is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise CorpusError(
            f"{file.path}: {name.partition('.')[0]} is needed to read it; "
            f"pip install 'ms-data[{extra}]'"
        ) from error


def damaged(file: OpenFile, kind: str, problem: object) -> CorpusError:
    """Say that a file is not whole."""
    words = " ".join(str(problem).split()) or type(problem).__name__
    return CorpusError(
        f"{file.path}: damaged {kind} ({words[:200]}); fetch the file or write it again"
    )


def not_utf8(content: bytes) -> str | None:
    """Say why some bytes are not UTF-8, or None if they are."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        return f"not UTF-8: byte 0x{byte:02x} at offset {error.start}; convert the file to UTF-8"
    return None
