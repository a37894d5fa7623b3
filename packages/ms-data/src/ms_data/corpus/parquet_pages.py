"""Checks the page headers of a Parquet file while it is read, before pages are decompressed.

A page header declares the uncompressed size of the page, and Arrow allocates and fills that much
memory. pyarrow limits the strings and lists of the footer, but not pages. A library must not set a
memory limit, which would apply to the whole process, so page sizes are checked here.

Headers use Thrift's compact protocol: numbered fields with small integers, and structs that are
skipped.
"""

import io
from collections.abc import Sequence
from io import BufferedReader
from typing import Any, NamedTuple

PAGE_LIMIT_MIB = 1024
"""Largest accepted page. A page is decompressed in one piece; writers create pages of 1 MiB, or of
one larger value."""

_HEADER_BYTES = 1 << 20
_STOP, _TRUE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 0, 1, 3, 7, 8, 9, 10, 11, 12
_DEPTH = 16


class Chunk(NamedTuple):
    """Byte range of one column's pages in one row group."""

    start: int
    stop: int
    uncompressed_bytes: int
    """Total uncompressed size of the pages, as the file footer declares it."""


class PageHeader(NamedTuple):
    """Sizes in a page header."""

    header_bytes: int
    uncompressed_bytes: int
    compressed_bytes: int


class ReadBlockedError(Exception):
    """A page was requested while reads were blocked."""


class CheckedPages(io.RawIOBase):
    """File object for pyarrow that checks each page header when it is first read."""

    def __init__(self, raw: BufferedReader) -> None:
        self._raw = raw
        self._expected: list[list[int]] = []
        self._reads_blocked = False

    def block_reads(self) -> None:
        """Make reads raise `ReadBlockedError` until `allow_reads`."""
        self._reads_blocked = True

    def allow_reads(self) -> None:
        """Allow reads again."""
        self._reads_blocked = False

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Set the column chunks that are read next."""
        self._expected = [list(chunk) for chunk in chunks]

    def shared_bytes(self, column: Any, chunk: Chunk) -> int:
        """Size limit of a value shared by several rows, such as a dictionary entry; otherwise 0."""
        if "DELTA_BYTE_ARRAY" in column.encodings:
            return min(chunk.uncompressed_bytes, PAGE_LIMIT_MIB << 20)
        if not column.has_dictionary_page:
            return 0
        self._raw.seek(chunk.start)
        # The dictionary page comes first; its size bounds its longest entry.
        content = self._raw.read(min(chunk.stop - chunk.start, _HEADER_BYTES >> 6))
        try:
            return min(read_header(content).uncompressed_bytes, chunk.uncompressed_bytes)
        except IndexError as error:
            raise ValueError(f"the page header at {chunk.start} is not terminated") from error

    def readable(self) -> bool:  # noqa: D102 - a file's
        return True

    def seekable(self) -> bool:  # noqa: D102 - a file's
        return True

    def tell(self) -> int:  # noqa: D102 - a file's
        return self._raw.tell()

    def seek(self, offset: int, whence: int = 0) -> int:  # noqa: D102 - a file's
        return self._raw.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:  # noqa: D102 - a file's
        if self._reads_blocked:
            raise ReadBlockedError
        position = self._raw.tell()
        content = self._raw.read(size)
        for chunk in self._expected:
            while position <= chunk[0] < min(position + len(content), chunk[1]):
                chunk[0] += self._check_page(content[chunk[0] - position :], chunk)
        return content

    def _check_page(self, content: bytes, chunk: list[int]) -> int:
        """Check the page at the start of `content`; return its size in the file."""
        start, stop, column_bytes = chunk
        try:
            page = read_header(content)
        except IndexError:  # the header extends past this read
            position = self._raw.tell()
            self._raw.seek(start)
            header = self._raw.read(min(stop - start, _HEADER_BYTES))
            self._raw.seek(position)
            try:
                page = read_header(header)
            except IndexError as error:
                raise ValueError(f"the page header at {start} is not terminated") from error
        if not 0 <= page.compressed_bytes <= stop - start - page.header_bytes:
            raise ValueError(f"the page at {start} declares {page.compressed_bytes} bytes")
        if not 0 <= page.uncompressed_bytes <= column_bytes:
            raise ValueError(
                f"the page at {start} declares {page.uncompressed_bytes} uncompressed bytes, more "
                "than its column"
            )
        if page.uncompressed_bytes > PAGE_LIMIT_MIB << 20:
            raise ValueError(
                f"the page at {start} has {page.uncompressed_bytes >> 20} MiB uncompressed, more "
                f"than {PAGE_LIMIT_MIB}: write the table in smaller pages"
            )
        return page.header_bytes + page.compressed_bytes


def read_header(content: bytes) -> PageHeader:
    """Read a page header at the start of `content`.

    Raises:
        IndexError: the header extends past `content`.
        ValueError: the bytes are not a page header.
    """
    sizes = {2: -1, 3: -1}  # fields 2 and 3: uncompressed_page_size, compressed_page_size
    offset = field = 0
    while True:
        type_code = (
            content[offset] & 15
        )  # low four bits: type; high four bits: field number increment
        if type_code == _STOP:
            return PageHeader(offset + 1, sizes[2], sizes[3])
        if content[offset] >> 4:
            field, offset = field + (content[offset] >> 4), offset + 1
        else:
            field, offset = _read_varint(content, offset + 1)
        if field in sizes and type_code > _BYTE and type_code < _DOUBLE:
            sizes[field], offset = _read_varint(content, offset)
        else:
            offset = _skip_value(content, offset, type_code, _DEPTH)


def _read_varint(content: bytes, offset: int) -> tuple[int, int]:
    """Read a zigzag-encoded varint; return it with the offset of the next value."""
    value, offset = _read_unsigned_varint(content, offset)
    return (value >> 1) ^ -(value & 1), offset  # zigzag: 0, -1, 1, -2, ...


def _read_unsigned_varint(content: bytes, offset: int) -> tuple[int, int]:
    """Read an unsigned varint; return it with the offset of the next value."""
    value = shift = 0
    while shift < 70:
        byte = content[offset]
        value |= (byte & 127) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 128:
            return value, offset
    raise ValueError("a page header holds a number of more than ten bytes")


def _skip_value(content: bytes, offset: int, type_code: int, depth: int) -> int:
    """Return the offset after a value of a given type."""
    if not depth or type_code > _STRUCT:
        raise ValueError("a page header is malformed")
    if type_code <= _TRUE + 1:
        return offset
    if type_code == _BYTE:
        return offset + 1
    if type_code == _DOUBLE:
        return offset + 8
    if type_code == _BINARY:
        length, offset = _read_unsigned_varint(content, offset)
        return offset + length  # the caller reads the byte there, so a short buffer is noticed
    if type_code == _STRUCT:
        while content[offset] & 15:
            inner_type, has_delta = content[offset] & 15, content[offset] >> 4
            offset = offset + 1 if has_delta else _read_varint(content, offset + 1)[1]
            offset = _skip_value(content, offset, inner_type, depth - 1)
        return offset + 1
    if type_code in (_LIST, _SET, _MAP):
        raise ValueError("a page header is malformed")
    return _read_varint(content, offset)[1]
