"""Reads checked frames from a shard."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from ms_data.disk.format import (
    FRAME,
    MAGIC,
    TRAILER,
    TRAILER_MARK,
    Footer,
    ShardEntry,
    checksum,
)
from ms_data.errors import DamageError


class Frame(NamedTuple):
    """A decoded frame."""

    tokens: NDArray[np.unsignedinteger]
    """Shape (n,), in the shard's token type; read-only."""
    ends: NDArray[np.int64]
    """Shape (e,), increasing: one past the last token of each document that ends here."""
    position: int
    """Tokens of the first document that stand in earlier frames."""


class Shard:
    """An open shard whose footer and table have been checked; frames are checked when read.

    Args:
        folder: the dataset.
        entry: the shard, as the index has it.
        frame_tokens: tokens in a frame, as the index has it.

    Raises:
        DamageError: the file is missing, has another size than the index says, or any byte of
            its head, table, footer or trailer is not what was written.
    """

    def __init__(self, folder: Path, entry: ShardEntry, frame_tokens: int) -> None:
        self.path = folder / entry.name
        self._decompressor = zstandard.ZstdDecompressor()
        try:
            # Without O_NONBLOCK, opening a pipe that has no writer would block forever.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags)
        except OSError as error:
            raise self._damage("file", f"cannot be opened: {error.strerror}") from error
        try:
            self._open(entry, frame_tokens)
        except DamageError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The module's own names may be gone when the interpreter ends.
        if getattr(self, "_descriptor", -1) >= 0:
            close(self._descriptor)
            self._descriptor = -1

    @property
    def frames(self) -> int:
        """Frames in this shard."""
        return self.footer.frames

    def read(self, number: int) -> Frame:
        """Decode frame `number` after checking its bytes.

        Raises:
            DamageError: names the file and the frame whose bytes have changed.
        """
        part = f"frame {number}"
        size, ends, position, expected = self.table[number].tolist()
        payload = self._bytes(part, int(self.offsets[number]), size)
        if checksum(payload) != expected:
            raise self._damage(part, "its checksum does not match its bytes")
        first = number * self.footer.frame_tokens
        tokens = min(self.footer.frame_tokens, self.footer.tokens - first)
        values = self._decode(part, payload, tokens + ends)
        bounds = values[tokens:].astype(np.int64)
        if ends and (bounds[0] < 1 or bounds[-1] > tokens or (np.diff(bounds) < 1).any()):
            raise self._damage(part, "document ends are out of order")
        return Frame(values[:tokens], bounds, position)

    def _decode(self, part: str, payload: bytes, count: int) -> NDArray[np.unsignedinteger]:
        kind = np.dtype(self.footer.token_type).newbyteorder("<")
        try:
            # The size is checked before zstd takes the memory that the frame asks for.
            if zstandard.frame_content_size(payload) != count * kind.itemsize:
                raise self._damage(part, "it does not hold the tokens that the table says")
            raw = self._decompressor.decompress(payload)
        except zstandard.ZstdError as error:
            raise self._damage(part, f"cannot be decompressed: {error}") from error
        return np.frombuffer(raw, kind)

    def _open(self, entry: ShardEntry, frame_tokens: int) -> None:
        size = os.fstat(self._descriptor).st_size
        if size != entry.size_bytes:
            raise self._damage("file", f"has {size} bytes where {entry.size_bytes} were written")
        if self._bytes("head", 0, len(MAGIC)) != MAGIC:
            raise self._damage("head", "does not begin as a shard does")
        footer, footer_offset = self._read_footer(entry)
        if footer.frame_tokens != frame_tokens:
            raise self._damage("footer", "its frames differ from the index")
        table_bytes = footer.frames * FRAME.itemsize
        table_offset = footer_offset - table_bytes
        if table_offset < len(MAGIC):
            raise self._damage("footer", "its table does not fit the file")
        raw = self._bytes("frame table", table_offset, table_bytes)
        if checksum(raw) != footer.table_checksum:
            raise self._damage("frame table", "its checksum does not match its bytes")
        table = np.frombuffer(raw, FRAME)
        bounds = np.concatenate(([len(MAGIC)], len(MAGIC) + np.cumsum(table["size"], dtype="i8")))
        if bounds[-1] != table_offset or table["ends"].sum(dtype="i8") != footer.documents:
            raise self._damage("frame table", "does not fit the frames")
        if table["ends"].max() > footer.frame_tokens:
            raise self._damage("frame table", "a frame has more documents than tokens")
        if table["position"].max() >= footer.tokens:
            raise self._damage("frame table", "a frame begins beyond the tokens of the shard")
        self.footer, self.table, self.offsets = footer, table, bounds[:-1]

    def _read_footer(self, entry: ShardEntry) -> tuple[Footer, int]:
        at = entry.size_bytes - TRAILER.size
        expected, size, mark = TRAILER.unpack(self._bytes("trailer", at, TRAILER.size))
        if mark != TRAILER_MARK or expected != entry.footer_checksum:
            raise self._damage("trailer", "is not the one that the index names")
        if size > at - len(MAGIC):
            raise self._damage("trailer", f"says a footer of {size} bytes, more than the file has")
        encoded = self._bytes("footer", at - size, size)
        if checksum(encoded) != expected:
            raise self._damage("footer", "its checksum does not match its bytes")
        try:
            footer = msgspec.msgpack.decode(encoded, type=Footer)
        except ValueError as error:
            raise self._damage("footer", str(error)) from error
        if (footer.tokens, footer.documents) != (entry.tokens, entry.documents):
            raise self._damage("footer", "its totals differ from the index")
        return footer, at - size

    def _bytes(self, part: str, offset: int, size: int) -> bytes:
        try:
            content = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise self._damage(part, f"cannot be read: {error.strerror}") from error
        if len(content) != size:
            raise self._damage(part, f"has {len(content)} of its {size} bytes")
        return content

    def _damage(self, part: str, problem: str) -> DamageError:
        return DamageError(self.path, part, problem)
