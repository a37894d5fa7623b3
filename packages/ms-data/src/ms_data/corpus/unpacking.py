"""Decompresses files and splits them into blocks, lines and JSON items of bounded size."""

import gzip
import io
import re
from collections.abc import Iterator
from typing import Any

import zstandard

COMPRESSIONS = ("gz", "zst")

READ_BYTES = 1 << 20
"""Largest block, for any compression ratio."""

_INPUT_BYTES = 1 << 8
"""Input bytes per step. zstd stores up to 128 KiB in four bytes, so this yields at most 8 MiB."""

_LARGEST_WINDOW = 1 << 27
"""zstd's default limit; without one, a file could demand any amount of memory."""


def decompress_blocks(raw: io.BufferedReader, compression: str) -> Iterator[bytes]:
    """Yield the content of a file, decompressed with `gz`, `zst` or "" (not compressed)."""
    if compression == "zst":
        yield from _decompress_zstd(raw)
        return
    file: Any = gzip.GzipFile(fileobj=raw) if compression == "gz" else raw
    while block := file.read(READ_BYTES):
        yield block


def _decompress_zstd(raw: io.BufferedReader) -> Iterator[bytes]:
    """Decompress like zstandard's reader, but reject a file that ends inside a frame."""
    decompressor = _zstd()
    at_frame_start = True
    while block := raw.read(_INPUT_BYTES):
        while block:
            at_frame_start = False
            content = decompressor.decompress(block)
            for start in range(0, len(content), READ_BYTES):
                yield content[start : start + READ_BYTES]
            # a file may contain several frames
            block = decompressor.unused_data if decompressor.eof else b""
            if decompressor.eof:
                decompressor = _zstd()
                at_frame_start = True
    if not at_frame_start:
        raise EOFError("the file ends inside a zstd frame")


def _zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


def split_lines(blocks: Iterator[bytes], limit: int) -> Iterator[bytes | None]:
    """Yield the lines without their ends; None for a line of more than `limit` bytes."""
    pending: list[bytes] = []
    size = 0
    for block in blocks:
        *complete, last = block.split(b"\n")
        if complete:
            yield b"".join((*pending, complete[0])) if size + len(complete[0]) <= limit else None
            for line in complete[1:]:
                yield line if len(line) <= limit else None
            pending, size = [], 0
        size += len(last)
        if size <= limit:
            pending.append(last)
        else:
            pending = []
    if size > limit:
        yield None
    elif tail := b"".join(pending):
        yield tail


class JSONArrayError(ValueError):
    """A file that is not one complete JSON array."""


_JSON_MARK = re.compile(rb'["\[\]{},]')
_JSON_STRING_BODY = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


def array_items(blocks: Iterator[bytes], limit: int) -> Iterator[bytes | None]:
    """Yield the JSON text of every item of an array; None for an item of more than `limit` bytes.

    Only brackets and strings are scanned, so a malformed item does not stop the scan.

    Raises:
        JSONArrayError: the array is not closed, or text other than whitespace follows it.
    """
    parts: list[bytes] = []  # beginning of the current item, from earlier blocks
    size = 0  # total bytes of the parts
    text = b""
    begin = position = depth = 0  # start of the item in text, scan position, nesting depth
    quoted = too_long = ended = False
    for block in blocks:
        parts.append(text[begin:position])
        size += position - begin
        if size > limit:
            parts, size, too_long = [], 0, depth > 0
        # Keep only the unscanned rest; the item's scanned beginning is in `parts`.
        text = text[position:] + block
        begin = position = 0
        while not ended:
            if quoted:
                body = _JSON_STRING_BODY.match(text, position)
                assert body is not None, "the pattern also matches the empty string"
                position = body.end()
                if text[position : position + 1] != b'"':
                    break  # the string continues in the next block
                quoted, position = False, position + 1
            token = _JSON_MARK.search(text, position)
            if token is None:
                position = len(text)
                break
            position = token.end()
            if token[0] == b'"':
                quoted = True
            elif token[0] in b"[{":
                depth += 1
                if depth == 1:
                    parts, size, begin = [], 0, position
            elif token[0] in b"]}":
                depth -= 1
                ended = depth <= 0
            if ended or (depth == 1 and token[0] == b","):
                item = b"".join((*parts, text[begin : position - 1])).strip()
                yield None if too_long or len(item) > limit else item
                parts, size, begin, too_long = [], 0, position, False
        if ended and text[position:].strip():
            raise JSONArrayError("text follows the end of the array")
        if ended:
            position = len(text)
    if not ended:
        raise JSONArrayError("the array is not closed")


class ByteReader:
    """Sequential reader of decompressed blocks."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._buffer = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Read `size` bytes, or fewer at the end; allocates no more than is available."""
        return b"".join(self._parts(size))

    def skip(self, size: int) -> int:
        """Skip `size` bytes; return how many were available."""
        return sum(map(len, self._parts(size)))

    def _parts(self, size: int) -> Iterator[memoryview]:
        while size > 0:
            if not self._buffer:
                self._buffer = memoryview(next(self._blocks, b""))
                if not self._buffer:
                    return
            part = self._buffer[:size]
            self._buffer = self._buffer[len(part) :]
            size -= len(part)
            yield part

    def line(self, limit: int) -> bytes:
        """Read up to and including the next newline, at most `limit` bytes."""
        parts: list[bytes] = []
        while limit > 0:
            if not self._buffer:
                self._buffer = memoryview(next(self._blocks, b""))
                if not self._buffer:
                    break
            chunk = bytes(self._buffer[:limit])
            end = chunk.find(b"\n") + 1 or len(chunk)
            parts.append(chunk[:end])
            self._buffer = self._buffer[end:]
            limit -= end
            if parts[-1].endswith(b"\n"):
                break
        return b"".join(parts)
