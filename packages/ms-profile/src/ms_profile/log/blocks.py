"""Event files are independent checksummed blocks, so that a torn tail costs one block.

A block is 20 bytes (magic, compressed size, raw size, its number in the file, CRC-32 of these three
and the payload) and a zstd frame. The numbers show what a checksum cannot: whole blocks that stand
twice, or are gone. A reader that meets damage looks for the next magic whose checksum holds; what
it may checksum on that search is bounded, or false headers that each claim the rest of a file would
make reading quadratic.
"""

import struct
import zlib
from collections.abc import Iterator

import zstandard
from msgspec import Struct

MAGIC = b"MSEC"
HEADER = struct.Struct("<4sIIII")
CHECKED = struct.Struct("<III")
MAX_RAW_BYTES = 1 << 24
MAX_PACKED_BYTES = MAX_RAW_BYTES + (1 << 17)
LEVEL = 3
FREE_BYTES = 1 << 24
SEARCHES = 4
"""Times its own size that searching a file may checksum, beyond `FREE_BYTES`."""


class Block(Struct, frozen=True):
    """One whole block's content, its number, and where the next one starts."""

    content: bytes
    number: int
    end: int


class Damage(Struct, frozen=True):
    """Bytes that are no block; `torn` when they may yet become one (the file's tail)."""

    start: int
    end: int
    torn: bool


def pack_block(content: bytes, number: int) -> bytes:
    """Compress and frame `content`, at most 16 MiB; no two blocks of a file have one number."""
    payload = zstandard.ZstdCompressor(level=LEVEL).compress(content)
    checked = CHECKED.pack(len(payload), len(content), number)
    checksum = zlib.crc32(payload, zlib.crc32(checked))
    return MAGIC + checked + struct.pack("<I", checksum) + payload


def scan_blocks(data: bytes, start: int = 0) -> Iterator[Block | Damage]:
    """Yield the blocks of a file's bytes from `start`, and the stretches between that are none.

    In linear time: once a search has checksummed several times the file's size in vain, larger
    blocks than what is left of that are no longer looked for.
    """
    decompressor = zstandard.ZstdDecompressor()
    budget = _Budget(FREE_BYTES + SEARCHES * len(data))
    position = start
    while position < len(data):
        block = _block_at(data, position, decompressor)
        if block is not None:
            yield block
            position = block.end
            continue
        upcoming = _next_block(data, position + 1, decompressor, budget)
        end = len(data) if upcoming is None else upcoming
        yield Damage(position, end, torn=upcoming is None and _may_be_torn(data, position))
        position = end


class _Budget:
    """Bytes that may still be checksummed in search of a block."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, size: int) -> bool:
        if size > self._left:
            return False
        self._left -= size
        return True


def _block_at(
    data: bytes,
    position: int,
    decompressor: zstandard.ZstdDecompressor,
    budget: _Budget | None = None,
) -> Block | None:
    if len(data) - position < HEADER.size:
        return None
    magic, size, raw_size, number, checksum = HEADER.unpack_from(data, position)
    begin = position + HEADER.size
    end = begin + size
    if magic != MAGIC or end > len(data) or raw_size > MAX_RAW_BYTES or size > MAX_PACKED_BYTES:
        return None
    if budget is not None and not budget.take(HEADER.size + size):
        return None
    payload = data[begin:end]
    checked = data[position + len(MAGIC) : position + len(MAGIC) + CHECKED.size]
    if zlib.crc32(payload, zlib.crc32(checked)) != checksum:
        return None
    try:
        content = decompressor.decompress(payload, max_output_size=raw_size)
    except zstandard.ZstdError:
        return None
    return Block(content, number, end) if len(content) == raw_size else None


def _next_block(
    data: bytes,
    position: int,
    decompressor: zstandard.ZstdDecompressor,
    budget: _Budget,
) -> int | None:
    while (position := data.find(MAGIC, position)) >= 0:
        if _block_at(data, position, decompressor, budget) is not None:
            return position
        position += 1
    return None


def _may_be_torn(data: bytes, position: int) -> bool:
    """Return whether a block that the file does not yet wholly hold begins at `position`."""
    head = data[position : position + HEADER.size]
    if len(head) < HEADER.size:
        return MAGIC.startswith(head[:4]) if len(head) < 4 else head.startswith(MAGIC)
    magic, size, raw_size, *_ = HEADER.unpack(head)
    fits = raw_size <= MAX_RAW_BYTES and size <= MAX_PACKED_BYTES
    return bool(magic == MAGIC and fits and size > len(data) - position - HEADER.size)
