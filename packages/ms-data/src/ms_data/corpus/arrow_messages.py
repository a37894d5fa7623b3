"""Reads the messages of an Arrow stream one by one, each checked before it is unpacked.

A message is the length of its metadata, the metadata (a FlatBuffer) and a body. The buffers of a
packed batch each begin with their size once they are unpacked, and so much memory is taken for it.
"""

import io
import struct
from collections.abc import Iterator
from typing import NamedTuple

from ms_data.corpus.unpacking import Content

BATCH_LIMIT_MIB = 2048
"""The largest record batch; each is read, and unpacked, whole."""

_METADATA_LIMIT_BYTES = 1 << 26
_CONTINUED = b"\xff\xff\xff\xff"
_DICTIONARY, _BATCH = 2, 3
_TOO_LARGE = "a record batch of {} MiB, more than {}: write the table in smaller batches"


class CheckedMessages(io.RawIOBase):
    """What pyarrow reads a stream from; ends where the stream does."""

    def __init__(self, content: Content) -> None:
        self._messages = _messages(content)
        self._left = memoryview(b"")
        self._at = 0

    def readable(self) -> bool:  # noqa: D102 - a file's
        return True

    def tell(self) -> int:  # noqa: D102 - a file's
        return self._at

    def read(self, size: int = -1) -> bytes:  # noqa: D102 - a file's
        parts = []
        while size > 0:
            if not self._left:
                self._left = memoryview(next(self._messages, b""))
                if not self._left:
                    break
            parts.append(self._left[:size])
            self._left = self._left[size:]
            size -= len(parts[-1])
        self._at += sum(map(len, parts))
        return b"".join(parts)


def _messages(content: Content) -> Iterator[bytes]:
    """Yield each message in parts, in order."""
    while True:
        begin = content.read(4)
        prefix = begin + content.read(4) if begin == _CONTINUED else begin
        yield prefix
        size = int.from_bytes(prefix[-4:], "little")
        if len(prefix) < 4 or not size:
            return
        if size > _METADATA_LIMIT_BYTES:
            raise ValueError(f"a message whose metadata is said to have {size} bytes")
        metadata = content.read(size)
        yield metadata
        if len(metadata) < size:
            return
        try:
            message = _Table.root(metadata)
            length = message.number(3, "q")
            if not 0 <= length <= BATCH_LIMIT_MIB << 20:
                raise ValueError(_TOO_LARGE.format(length >> 20, BATCH_LIMIT_MIB))
            body = content.read(length)
            if len(body) == length:
                _check_unpacked(message, body)
        except struct.error as error:
            raise ValueError(f"a message whose metadata is malformed: {error}") from error
        if body:
            yield body


def _check_unpacked(message: "_Table", body: bytes) -> None:
    """Check what the buffers of a batch say that they unpack to."""
    kind = message.number(1, "B")
    if kind not in (_DICTIONARY, _BATCH):
        return
    batch = message.table(2)
    if kind == _DICTIONARY and batch is not None:
        batch = batch.table(1)
    if batch is None or batch.table(3) is None:
        return
    whole = 0
    for offset, length in batch.pairs(2):
        if length >= 8:
            whole += max(0, struct.unpack_from("<q", body, offset)[0])
    if whole > BATCH_LIMIT_MIB << 20:
        raise ValueError(_TOO_LARGE.format(whole >> 20, BATCH_LIMIT_MIB))


class _Table(NamedTuple):
    """A table of a FlatBuffer: fields by their number, each where the table's list says."""

    content: bytes
    at: int

    @classmethod
    def root(cls, content: bytes) -> "_Table":
        return cls(content, struct.unpack_from("<I", content)[0])

    def _field(self, number: int) -> int:
        """Find where a field stands; 0 where it is left out."""
        places = self.at - struct.unpack_from("<i", self.content, self.at)[0]
        if places < 0 or 4 + 2 * number >= struct.unpack_from("<H", self.content, places)[0]:
            return 0
        offset: int = struct.unpack_from("<H", self.content, places + 4 + 2 * number)[0]
        return self.at + offset if offset else 0

    def number(self, number: int, kind: str) -> int:
        at = self._field(number)
        return int(struct.unpack_from("<" + kind, self.content, at)[0]) if at else 0

    def table(self, number: int) -> "_Table | None":
        at = self._field(number)
        if not at:
            return None
        return _Table(self.content, at + struct.unpack_from("<I", self.content, at)[0])

    def pairs(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs of numbers in a list."""
        found = self.table(number)
        if found is None:
            return
        (count,) = struct.unpack_from("<I", found.content, found.at)
        for one in range(count):
            offset, length = struct.unpack_from("<qq", found.content, found.at + 4 + 16 * one)
            if offset < 0 or length < 0:
                raise struct.error("a buffer lies before its batch")
            yield offset, length
