"""Defines readers, which give the documents of one kind of file; `readers` holds them."""

from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from attrs import field, frozen

from ms_data.corpus.file_kinds import NotText
from ms_data.errors import SettingError

DOCUMENT_LIMIT_MIB = 16
"""A document of text of this size takes some 2 GB while it is tokenized."""

TOO_LONG = (
    "longer than the largest document that is read; split it, or raise --document-limit-mib, for "
    "some 130 times as much memory"
)


class Invalid(NamedTuple):
    """Stands in for a document that cannot be read."""

    reason: str


Found = str | Invalid | NotText
"""A document, or why there is none."""


class OpenFile(NamedTuple):
    """One file of a corpus, to be read once."""

    path: Path
    name: str
    """Its name, without .gz or .zst."""
    blocks: Iterator[bytes]
    """Its content in order, unpacked, in blocks of bounded size."""
    raw: BufferedReader
    """The file itself, for formats that are not read in order."""

    def whole(self, limit: int) -> "bytes | Invalid":
        """Reads a file that is one document of at most `limit` bytes."""
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

    text_key: str = "text"
    """The member of a row that holds the text."""
    skip_invalid: bool = False
    """Leave out what cannot be read instead of stopping."""
    parse: Callable[[bytes], str] | None = None
    """Makes a document's text of a row of JSON, or raises ValueError; None takes `text_key`."""
    document_limit_mib: int = field(default=DOCUMENT_LIMIT_MIB)
    """A longer document, or row, is not valid."""
    named: bool = False
    """The one file was named itself, so that it must be text."""

    @document_limit_mib.validator
    def _at_least_one(self, _: object, value: int) -> None:
        if value < 1:
            raise SettingError(f"document_limit_mib is {value}; it must be 1 or more")

    @property
    def document_limit_bytes(self) -> int:
        """The limit in bytes."""
        return self.document_limit_mib << 20


@frozen(kw_only=True)
class Reader:
    """Reads one kind of file, which its name or its first bytes tell."""

    documents: Callable[[OpenFile, ReadOptions], Iterator[Found]]
    """Gives each document of a file, in order; an empty text is passed over."""
    suffixes: tuple[str, ...] = ()
    """How the names of its files end."""
    signatures: tuple[bytes, ...] = ()
    """How its files begin; they are not refused as files that are no text."""
    rows: bool = False
    """Its documents are rows, of which an instruction set is made."""


def not_utf8(content: bytes) -> str | None:
    """Says why some bytes are not UTF-8, or None if they are."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        return f"not UTF-8: byte 0x{byte:02x} at offset {error.start}; convert the file to UTF-8"
    return None
