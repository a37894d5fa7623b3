"""Checks the pages of a Parquet file as they pass, before anything is unpacked.

A page says in its header how large it is once it is unpacked, and so much memory is taken for it.
Headers are Thrift's compact protocol: fields of small numbers, and structures that are passed over.
"""

import io
from collections.abc import Sequence
from io import BufferedReader
from typing import Any, NamedTuple

PAGE_LIMIT_MIB = 1024
"""A page is unpacked whole; writers make them of one MiB, or of one value."""

_HEADER_BYTES = 1 << 20
_STOP, _TRUE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 3, 7, 8, 9, 10, 11, 12
_DEPTH = 16


class Chunk(NamedTuple):
    """Where the pages of one column lie in one row group."""

    start: int
    stop: int
    unpacked_bytes: int
    """What all pages take together, as the file's footer says."""


class PageHeader(NamedTuple):
    """What a page says of itself."""

    header_bytes: int
    unpacked_bytes: int
    packed_bytes: int


class HeldError(Exception):
    """A page was asked for between `hold` and `release`."""


class CheckedPages(io.RawIOBase):
    """A file whose pages are checked when they are first read."""

    def __init__(self, raw: BufferedReader) -> None:
        self._raw = raw
        self._next: list[list[int]] = []
        self._held = False

    def hold(self) -> None:
        """Refuse to give anything until `release`."""
        self._held = True

    def release(self) -> None:
        """Give what is asked for again."""
        self._held = False

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Say which columns are read from here on."""
        self._next = [list(chunk) for chunk in chunks]

    def shared_bytes(self, column: Any, chunk: Chunk) -> int:
        """Read how large a value that many rows share can be; 0 where each row has its own."""
        if "DELTA_BYTE_ARRAY" in column.encodings:
            return min(chunk.unpacked_bytes, PAGE_LIMIT_MIB << 20)
        if not column.has_dictionary_page:
            return 0
        self._raw.seek(chunk.start)
        content = self._raw.read(min(chunk.stop - chunk.start, _HEADER_BYTES >> 6))
        try:
            return min(read_header(content).unpacked_bytes, chunk.unpacked_bytes)
        except IndexError as error:
            raise ValueError(f"the header of the page at {chunk.start} does not end") from error

    def readable(self) -> bool:  # noqa: D102 - a file's
        return True

    def seekable(self) -> bool:  # noqa: D102 - a file's
        return True

    def tell(self) -> int:  # noqa: D102 - a file's
        return self._raw.tell()

    def seek(self, offset: int, whence: int = 0) -> int:  # noqa: D102 - a file's
        return self._raw.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:  # noqa: D102 - a file's
        if self._held:
            raise HeldError
        at = self._raw.tell()
        found = self._raw.read(size)
        for chunk in self._next:
            while at <= chunk[0] < min(at + len(found), chunk[1]):
                chunk[0] += self._page(found[chunk[0] - at :], chunk)
        return found

    def _page(self, content: bytes, chunk: list[int]) -> int:
        """Check the page at the start of `content`; return its size as it lies in the file."""
        start, stop, whole = chunk
        try:
            page = read_header(content)
        except IndexError:  # the rest of its header was not read with it
            before = self._raw.tell()
            self._raw.seek(start)
            more = self._raw.read(min(stop - start, _HEADER_BYTES))
            self._raw.seek(before)
            try:
                page = read_header(more)
            except IndexError as error:
                raise ValueError(f"the header of the page at {start} does not end") from error
        if not 0 <= page.packed_bytes <= stop - start - page.header_bytes:
            raise ValueError(f"the page at {start} is said to have {page.packed_bytes} bytes")
        if not 0 <= page.unpacked_bytes <= whole:
            raise ValueError(
                f"the page at {start} is said to unpack to {page.unpacked_bytes} bytes, more than "
                "its column"
            )
        if page.unpacked_bytes > PAGE_LIMIT_MIB << 20:
            raise ValueError(
                f"the page at {start} unpacks to {page.unpacked_bytes >> 20} MiB, more than "
                f"{PAGE_LIMIT_MIB}: write the table in smaller pages"
            )
        return page.header_bytes + page.packed_bytes


def read_header(content: bytes) -> PageHeader:
    """Read the header of a page at the start of some bytes.

    Raises:
        IndexError: the header goes on after them.
        ValueError: they are no header.
    """
    sizes = {2: -1, 3: -1}
    at = field = 0
    while True:
        kind = content[at] & 15
        if kind == _STOP:
            return PageHeader(at + 1, sizes[2], sizes[3])
        if content[at] >> 4:
            field, at = field + (content[at] >> 4), at + 1
        else:
            field, at = _number(content, at + 1)
        if field in sizes and kind > _BYTE and kind < _DOUBLE:
            sizes[field], at = _number(content, at)
        else:
            at = _after(content, at, kind, _DEPTH)


def _number(content: bytes, at: int) -> tuple[int, int]:
    """Read a number with its sign, and where the next value stands."""
    value, at = _length(content, at)
    return (value >> 1) ^ -(value & 1), at


def _length(content: bytes, at: int) -> tuple[int, int]:
    """Read a number without a sign, and where the next value stands."""
    value = shift = 0
    while shift < 70:
        byte = content[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("the header of a page holds an endless number")


def _after(content: bytes, at: int, kind: int, depth: int) -> int:
    """Find where a value of some kind ends."""
    if not depth or kind > _STRUCT:
        raise ValueError("the header of a page is malformed")
    if kind <= _TRUE + 1:
        return at
    if kind == _BYTE:
        return at + 1
    if kind == _DOUBLE:
        return at + 8
    if kind == _BINARY:
        length, at = _length(content, at)
        return at + length  # a byte beyond it is looked at next, so that it is all there
    if kind == _STRUCT:
        while content[at] & 15:
            inner, short = content[at] & 15, content[at] >> 4
            at = at + 1 if short else _number(content, at + 1)[1]
            at = _after(content, at, inner, depth - 1)
        return at + 1
    if kind in (_LIST, _SET, _MAP):
        raise ValueError("the header of a page is malformed")
    return _number(content, at)[1]
