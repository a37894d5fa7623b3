"""Reads plain and packed files in blocks and lines of bounded size."""

import gzip
import io
import re
from collections.abc import Iterator
from typing import Any

import zstandard

PACKINGS = ("gz", "zst")

READ_BYTES = 1 << 20
"""No block is longer, however well it was packed."""

_FED_BYTES = 1 << 8
"""zstd packs 128 KiB in four bytes at best, so that this unpacks to 8 MiB at most."""

_LARGEST_WINDOW = 1 << 27
"""The largest that zstd unpacks by default; beyond it a file would choose the memory taken."""


def unpacked(raw: io.BufferedReader, packing: str) -> Iterator[bytes]:
    """Read an open file that is packed by `gz`, `zst` or not at all."""
    if packing == "zst":
        yield from _unpacked_zstd(raw)
        return
    file: Any = gzip.GzipFile(fileobj=raw) if packing == "gz" else raw
    while block := file.read(READ_BYTES):
        yield block


def _unpacked_zstd(raw: io.BufferedReader) -> Iterator[bytes]:
    """Unpack as zstandard's own reader does, but refuse a file that ends inside a frame."""
    unpacker = _zstd()
    fresh = True
    while block := raw.read(_FED_BYTES):
        while block:
            fresh = False
            found = unpacker.decompress(block)
            for start in range(0, len(found), READ_BYTES):
                yield found[start : start + READ_BYTES]
            block = unpacker.unused_data if unpacker.eof else b""
            if unpacker.eof:
                unpacker = _zstd()
                fresh = True
    if not fresh:
        raise EOFError("it ends inside a zstd frame")


def _zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


def lines_of(blocks: Iterator[bytes], limit: int) -> Iterator[bytes | None]:
    """Yield each line without its end, or None for one of more than `limit` bytes."""
    rest: list[bytes] = []
    size = 0
    for block in blocks:
        *whole, last = block.split(b"\n")
        if whole:
            yield b"".join((*rest, whole[0])) if size + len(whole[0]) <= limit else None
            for line in whole[1:]:
                yield line if len(line) <= limit else None
            rest, size = [], 0
        size += len(last)
        if size <= limit:
            rest.append(last)
        else:
            rest = []
    if size > limit:
        yield None
    elif tail := b"".join(rest):
        yield tail


class JSONArrayError(ValueError):
    """A file that is not one whole JSON array."""


_JSON_MARK = re.compile(rb'["\[\]{},]')
_JSON_STRING_BODY = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


def array_items(blocks: Iterator[bytes], limit: int) -> Iterator[bytes | None]:
    """Yield the JSON text of each item of an array, or None for one of more than `limit` bytes.

    Only brackets and strings are looked at, so a malformed item does not end the reading.

    Raises:
        JSONArrayError: the array has no end, or more than white space follows it.
    """
    parts: list[bytes] = []  # of the item, from earlier blocks
    size = 0  # bytes of the parts
    text = b""
    begin = at = depth = 0  # where the item begins, how far it is scanned, nesting
    quoted = too_long = ended = False
    for block in blocks:
        parts.append(text[begin:at])
        size += at - begin
        if size > limit:
            parts, size, too_long = [], 0, depth > 0
        text = text[at:] + block
        begin = at = 0
        while not ended:
            if quoted:
                body = _JSON_STRING_BODY.match(text, at)
                assert body is not None, "it also matches the empty string"
                at = body.end()
                if text[at : at + 1] != b'"':
                    break  # the string continues in the next block
                quoted, at = False, at + 1
            mark = _JSON_MARK.search(text, at)
            if mark is None:
                at = len(text)
                break
            at = mark.end()
            if mark[0] == b'"':
                quoted = True
            elif mark[0] in b"[{":
                depth += 1
                if depth == 1:
                    parts, size, begin = [], 0, at
            elif mark[0] in b"]}":
                depth -= 1
                ended = depth <= 0
            if ended or (depth == 1 and mark[0] == b","):
                item = b"".join((*parts, text[begin : at - 1])).strip()
                yield None if too_long or len(item) > limit else item
                parts, size, begin, too_long = [], 0, at, False
        if ended and text[at:].strip():
            raise JSONArrayError("more text follows the end of the array")
        if ended:
            at = len(text)
    if not ended:
        raise JSONArrayError("the array has no end")


class Content:
    """The unpacked content of a file, read in order by as many bytes as are asked for."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._left = memoryview(b"")

    def read(self, size: int) -> bytes:
        """Read `size` bytes, or as many as there are; memory grows only with what was found."""
        return b"".join(self._parts(size))

    def skip(self, size: int) -> int:
        """Pass over `size` bytes; return how many there were."""
        return sum(map(len, self._parts(size)))

    def _parts(self, size: int) -> Iterator[memoryview]:
        while size > 0:
            if not self._left:
                self._left = memoryview(next(self._blocks, b""))
                if not self._left:
                    return
            part = self._left[:size]
            self._left = self._left[len(part) :]
            size -= len(part)
            yield part

    def line(self, limit: int) -> bytes:
        """Read up to the end of a line, which is kept, or `limit` bytes."""
        parts: list[bytes] = []
        while limit > 0:
            if not self._left:
                self._left = memoryview(next(self._blocks, b""))
                if not self._left:
                    break
            near = bytes(self._left[:limit])
            end = near.find(b"\n") + 1 or len(near)
            parts.append(near[:end])
            self._left = self._left[end:]
            limit -= end
            if parts[-1].endswith(b"\n"):
                break
        return b"".join(parts)
