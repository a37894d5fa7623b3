"""Event files are independent checksummed blocks, so that a torn tail costs one block.

A block is 16 bytes (magic, compressed size, raw size, CRC-32 of both sizes and the payload) and a
zstd frame. A reader that meets damage looks for the next magic whose checksum holds.
"""

import struct
import zlib
from collections.abc import Iterator

import zstandard
from msgspec import Struct

__all__ = ["Block", "Damage", "pack_block", "scan_blocks"]

MAGIC = b"MSEB"
HEADER = struct.Struct("<4sIII")
MAX_RAW_BYTES = 1 << 26
LEVEL = 3


class Block(Struct, frozen=True):
    """One whole block's content and where the next one starts."""

    content: bytes
    end: int


class Damage(Struct, frozen=True):
    """Bytes that are no block; `torn` when they may yet become one (the file's tail)."""

    start: int
    end: int
    torn: bool


def pack_block(content: bytes) -> bytes:
    """Compress and frame `content`, at most 64 MiB."""
    payload = zstandard.ZstdCompressor(level=LEVEL).compress(content)
    sizes = struct.pack("<II", len(payload), len(content))
    return HEADER.pack(
        MAGIC, len(payload), len(content), zlib.crc32(payload, zlib.crc32(sizes))
    ) + (payload)


def scan_blocks(data: bytes, start: int = 0) -> Iterator[Block | Damage]:
    """Yield the blocks of a file's bytes from `start`, and the stretches between that are none."""
    decompressor = zstandard.ZstdDecompressor()
    position = start
    while position < len(data):
        block = _block_at(data, position, decompressor)
        if block is not None:
            yield block
            position = block.end
            continue
        upcoming = _next_block(data, position + 1, decompressor)
        end = len(data) if upcoming is None else upcoming
        yield Damage(position, end, torn=upcoming is None and _may_be_torn(data, position))
        position = end


def _block_at(data: bytes, position: int, decompressor: zstandard.ZstdDecompressor) -> Block | None:
    if len(data) - position < HEADER.size:
        return None
    magic, size, raw_size, checksum = HEADER.unpack_from(data, position)
    begin = position + HEADER.size
    end = begin + size
    if magic != MAGIC or end > len(data) or raw_size > MAX_RAW_BYTES:
        return None
    payload = data[begin:end]
    if zlib.crc32(payload, zlib.crc32(data[position + 4 : position + 12])) != checksum:
        return None
    try:
        content = decompressor.decompress(payload, max_output_size=raw_size)
    except zstandard.ZstdError:
        return None
    return Block(content, end) if len(content) == raw_size else None


def _next_block(data: bytes, position: int, decompressor: zstandard.ZstdDecompressor) -> int | None:
    while (position := data.find(MAGIC, position)) >= 0:
        if _block_at(data, position, decompressor) is not None:
            return position
        position += 1
    return None


def _may_be_torn(data: bytes, position: int) -> bool:
    """Whether what stands at `position` is the start of a block that the file does not yet hold."""
    head = data[position : position + HEADER.size]
    if len(head) < HEADER.size:
        return MAGIC.startswith(head[:4]) if len(head) < 4 else head.startswith(MAGIC)
    magic, size, raw_size, _ = HEADER.unpack(head)
    return bool(magic == MAGIC and raw_size <= MAX_RAW_BYTES and size > len(data) - position - 16)
