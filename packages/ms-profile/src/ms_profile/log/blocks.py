"""Event files as independent checksummed blocks, so that a torn tail costs one block.

A block is a 20-byte header (magic, compressed size, raw size, block number in the file, and CRC-32
of these three and the payload) and a zstd frame. The numbers reveal what checksums cannot: repeated
or missing blocks. After damage, a reader searches for the next magic with a valid checksum. The
bytes checksummed in that search are limited, as false headers that each claim the rest of the file
would make reading quadratic.
"""

import struct
import zlib
from collections.abc import Iterator

import zstandard
from msgspec import Struct

MAGIC = b"MSEC"
HEADER = struct.Struct("<4sIIII")
CHECKED_FIELDS = struct.Struct("<III")
MAX_RAW_BYTES = 1 << 24
MAX_PACKED_BYTES = MAX_RAW_BYTES + (1 << 17)  # incompressible content grows slightly
LEVEL = 3
FREE_BYTES = 1 << 24
SEARCH_FACTOR = 4
"""Limit of checksummed bytes in a search, in multiples of the file size beyond `FREE_BYTES`."""


class Block(Struct, frozen=True):
    """Content and number of a valid block, and the offset of the next one."""

    content: bytes
    number: int
    end: int


class Damage(Struct, frozen=True):
    """Bytes that are not a block; `torn` if they may be an incomplete block at the file's end."""

    start: int
    end: int
    torn: bool


def pack_block(content: bytes, number: int) -> bytes:
    """Compress and frame `content` of at most 16 MiB; `number` must be unique within the file."""
    payload = zstandard.ZstdCompressor(level=LEVEL).compress(content)
    checked = CHECKED_FIELDS.pack(len(payload), len(content), number)
    checksum = zlib.crc32(payload, zlib.crc32(checked))
    # The checksum covers sizes and number too, which a reader uses before it decompresses.
    return MAGIC + checked + struct.pack("<I", checksum) + payload


def scan_blocks(data: bytes, start: int = 0) -> Iterator[Block | Damage]:
    """Yield the blocks in a file's bytes from `start`, and the damaged ranges between them.

    Takes linear time: once a search has checksummed several times the file's size without success,
    it ignores blocks larger than the rest of its budget.
    """
    decompressor = zstandard.ZstdDecompressor()
    budget = _Budget(FREE_BYTES + SEARCH_FACTOR * len(data))
    position = start
    while position < len(data):
        block = _block_at(data, position, decompressor)
        if block is not None:
            yield block
            position = block.end
            continue
        # Damage: continue at the next magic that starts a block with a valid checksum.
        upcoming = _next_block(data, position + 1, decompressor, budget)
        end = len(data) if upcoming is None else upcoming
        yield Damage(position, end, torn=upcoming is None and _may_be_torn(data, position))
        position = end


class _Budget:
    """Bytes that a search may still checksum."""

    def __init__(self, size: int) -> None:
        self._remaining = size

    def take(self, size: int) -> bool:
        if size > self._remaining:
            return False
        self._remaining -= size
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
    # Taken before the checksum is computed, as a false header may claim any size.
    if budget is not None and not budget.take(HEADER.size + size):
        return None
    payload = data[begin:end]
    checked = data[position + len(MAGIC) : position + len(MAGIC) + CHECKED_FIELDS.size]
    if zlib.crc32(payload, zlib.crc32(checked)) != checksum:
        return None
    try:
        # The output is limited to the checksummed size, so at most to MAX_RAW_BYTES.
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
    """Return whether `position` may be the start of a block that is not completely written yet."""
    head = data[position : position + HEADER.size]
    # The file ends inside the header: only the magic can be compared.
    if len(head) < HEADER.size:
        return MAGIC.startswith(head[:4]) if len(head) < 4 else head.startswith(MAGIC)
    magic, size, raw_size, *_ = HEADER.unpack(head)
    fits = raw_size <= MAX_RAW_BYTES and size <= MAX_PACKED_BYTES
    return bool(magic == MAGIC and fits and size > len(data) - position - HEADER.size)
