"""Reads an Arrow stream message by message and checks sizes before anything is decompressed.

A message is the length of its metadata, the metadata (a FlatBuffer) and a body. Every compressed
buffer of a batch starts with its uncompressed size, and Arrow allocates and fills that much memory.
pyarrow has no limit for it, and reports the sizes only after decompression, so they are checked
here.
"""

import io
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ms_data.corpus.unpacking import ByteReader

BATCH_LIMIT_MIB = 2048
"""Largest accepted record batch; a batch is read and decompressed in one piece."""

_METADATA_LIMIT_BYTES = 1 << 26
_CONTINUED = b"\xff\xff\xff\xff"
_DICTIONARY, _BATCH = 2, 3
_TOO_LARGE = "a record batch of {} MiB, more than {}: write the table in smaller batches"


class CheckedMessages(io.RawIOBase):
    """File object for pyarrow that ends where the stream ends."""

    def __init__(self, content: ByteReader) -> None:
        self._messages = _messages(content)
        self._buffer = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:  # noqa: D102 - a file's
        return True

    def tell(self) -> int:  # noqa: D102 - a file's
        return self._position

    def read(self, size: int = -1) -> bytes:  # noqa: D102 - a file's
        parts = []
        while size > 0:
            if not self._buffer:
                self._buffer = memoryview(next(self._messages, b""))
                if not self._buffer:
                    break
            parts.append(self._buffer[:size])
            self._buffer = self._buffer[size:]
            size -= len(parts[-1])
        self._position += sum(map(len, parts))
        return b"".join(parts)


def _messages(content: ByteReader) -> Iterator[bytes]:
    """Yield the stream in parts (prefix, metadata, body), each checked first."""
    while True:
        # Since Arrow 0.15 a continuation mark precedes the length.
        begin = content.read(4)
        prefix = begin + content.read(4) if begin == _CONTINUED else begin
        yield prefix
        size = int.from_bytes(prefix[-4:], "little")  # length of the metadata; 0 ends the stream
        if len(prefix) < 4 or not size:
            return
        if size > _METADATA_LIMIT_BYTES:
            raise ValueError(f"a message declares {size} bytes of metadata")
        metadata = content.read(size)
        yield metadata
        if len(metadata) < size:  # a truncated stream; pyarrow reports it
            return
        try:
            message = _Table.root(metadata)
            length = message.number(3, "q")  # Message.bodyLength
            if not 0 <= length <= BATCH_LIMIT_MIB << 20:
                raise ValueError(_TOO_LARGE.format(length >> 20, BATCH_LIMIT_MIB))
            body = content.read(length)
            # A truncated body is passed on unchanged, and pyarrow reports it.
            if len(body) == length:
                _check_uncompressed_size(message, body)
        except struct.error as error:
            raise ValueError(f"a message whose metadata is malformed: {error}") from error
        if body:
            yield body


def _check_uncompressed_size(message: "_Table", body: bytes) -> None:
    """Check the total uncompressed size that the buffers of a batch declare."""
    header_type = message.number(1, "B")  # Message.header_type
    if header_type not in (_DICTIONARY, _BATCH):
        return
    batch = message.table(2)  # Message.header
    if header_type == _DICTIONARY and batch is not None:
        batch = batch.table(1)  # DictionaryBatch.data
    if batch is None or batch.table(3) is None:  # RecordBatch.compression
        return
    total_bytes = 0
    for offset, length in batch.pairs(2):  # RecordBatch.buffers
        # A non-empty compressed buffer starts with its uncompressed size; -1 means stored
        # uncompressed.
        if length >= 8:
            total_bytes += max(0, struct.unpack_from("<q", body, offset)[0])
    if total_bytes > BATCH_LIMIT_MIB << 20:
        raise ValueError(_TOO_LARGE.format(total_bytes >> 20, BATCH_LIMIT_MIB))


class _Table(NamedTuple):
    """FlatBuffer table: numbered fields, located through the table's vtable."""

    content: bytes
    at: int

    @classmethod
    def root(cls, content: bytes) -> "_Table":
        return cls(content, struct.unpack_from("<I", content)[0])

    def _field(self, number: int) -> int:
        """Offset of a field; 0 if the field is absent."""
        vtable = self.at - struct.unpack_from("<i", self.content, self.at)[0]
        if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", self.content, vtable)[0]:
            return 0
        offset: int = struct.unpack_from("<H", self.content, vtable + 4 + 2 * number)[0]
        return self.at + offset if offset else 0

    def number(self, number: int, format_char: str) -> int:
        at = self._field(number)
        return int(struct.unpack_from("<" + format_char, self.content, at)[0]) if at else 0

    def table(self, number: int) -> "_Table | None":
        at = self._field(number)
        if not at:
            return None
        return _Table(self.content, at + struct.unpack_from("<I", self.content, at)[0])

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of 64-bit integers of a vector field."""
        vector = self.table(number)
        if vector is None:
            return
        (count,) = struct.unpack_from("<I", vector.content, vector.at)
        for index in range(count):
            offset, length = struct.unpack_from("<qq", vector.content, vector.at + 4 + 16 * index)
            if offset < 0 or length < 0:
                raise struct.error("a buffer starts before its batch")
            yield offset, length
