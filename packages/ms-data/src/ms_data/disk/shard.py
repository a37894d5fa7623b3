"""Reads checked frames from a shard."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
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
from ms_data.disk.remote import RemoteFile, RemoteShards
from ms_data.errors import DamageError

REREADS = 4
"""Maximum number of uncached refetches of a damaged frame or footer in an object store."""
REREAD_TAIL_BYTES = 1 << 20
"""End of a shard with its frame table and footer."""


class Frame(NamedTuple):
    """A decoded frame."""

    tokens: NDArray[np.unsignedinteger]
    """Shape (n,), in the token type of the shard; read-only."""
    ends: NDArray[np.int64]
    """Shape (e,), increasing: one past the last token of every document that ends here."""
    position: int
    """Tokens of the first document that are in earlier frames."""


class Shard:
    """An open shard. The footer and the table are checked on opening, frames when they are read.

    Args:
        folder: folder of the dataset.
        entry: entry of the shard in the index.
        frame_tokens: tokens per frame, from the index.
        fingerprint: fingerprint of the dataset, for the cache of a remote folder.

    Raises:
        DamageError: the file is missing, has the wrong size, or has a damaged head, table, footer
            or trailer.
    """

    def __init__(
        self,
        folder: Path | RemoteShards,
        entry: ShardEntry,
        frame_tokens: int,
        *,
        fingerprint: str = "",
    ) -> None:
        self._decompressor = zstandard.ZstdDecompressor()
        self._descriptor = -1
        self._remote: RemoteFile | None = None
        self.path: PurePath | str
        if isinstance(folder, RemoteShards):
            self.path = folder.path(entry.name)
            self._remote = folder.open(entry.name, entry.size_bytes, fingerprint)
            self._open_remote(entry, frame_tokens)
            return
        self.path = folder / entry.name
        try:
            # Without O_NONBLOCK, opening a pipe that has no writer would block forever.
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags)
        except OSError as error:
            raise self._damage_error("file", f"cannot be opened: {error.strerror}") from error
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
        # `os.close` is a default argument because globals may be gone at interpreter exit.
        if getattr(self, "_descriptor", -1) >= 0:
            close(self._descriptor)
            self._descriptor = -1

    @property
    def frames(self) -> int:
        """Number of frames in this shard."""
        return self.footer.frames

    def read(self, number: int) -> Frame:
        """Check and decode frame `number`.

        Raises:
            DamageError: the frame is damaged.
        """
        part = f"frame {number}"
        # The table was checked on opening, so sizes and counts can be trusted here.
        size, ends, position, expected = self.table[number].tolist()
        payload = self._read_bytes(part, int(self.offsets[number]), size)
        for _ in range(REREADS if self._remote is not None else 0):
            if checksum(payload) == expected:
                break
            # Damaged in transit or in the cache: fetch the store's copy again.
            payload = self._read_bytes(part, int(self.offsets[number]), size, fresh=True)
        if checksum(payload) != expected:
            raise self._damage_error(part, "checksum mismatch")
        first = number * self.footer.frame_tokens
        tokens = min(self.footer.frame_tokens, self.footer.tokens - first)
        # The last frame may have fewer tokens. Document ends are stored after the tokens.
        values = self._decode(part, payload, tokens + ends)  # (tokens + ends,)
        bounds = values[tokens:].astype(np.int64)  # (ends,) document ends in the frame
        if ends and (bounds[0] < 1 or bounds[-1] > tokens or (np.diff(bounds) < 1).any()):
            raise self._damage_error(part, "document ends are out of order")
        return Frame(values[:tokens], bounds, position)

    def _decode(self, part: str, payload: bytes, count: int) -> NDArray[np.unsignedinteger]:
        dtype = np.dtype(self.footer.token_type).newbyteorder("<")
        try:
            # Check the declared size first, because zstd allocates that amount of memory.
            if zstandard.frame_content_size(payload) != count * dtype.itemsize:
                raise self._damage_error(part, "its size does not match the frame table")
            raw = self._decompressor.decompress(payload)
        except zstandard.ZstdError as error:
            raise self._damage_error(part, f"cannot be decompressed: {error}") from error
        return np.frombuffer(raw, dtype)

    def prefetch(self, frames: Iterable[int]) -> None:
        """Fetch the bytes of frames from an object store together; does nothing on a disk."""
        if self._remote is not None:
            # A frame ends where the next one begins.
            ends = [*self.offsets[1:].tolist(), self._frames_end]
            spans = [(int(self.offsets[number]), int(ends[number])) for number in frames]
            self._remote.prefetch(spans)

    def _open_remote(self, entry: ShardEntry, frame_tokens: int) -> None:
        assert self._remote is not None
        for _ in range(REREADS):
            try:
                return self._open(entry, frame_tokens)
            except DamageError:  # perhaps damaged in transit or in the cache
                # Replace the cached head and tail, which have the magic, frame table and footer.
                tail = max(0, entry.size_bytes - REREAD_TAIL_BYTES)
                self._remote.read(0, len(MAGIC), fresh=True)
                self._remote.read(tail, entry.size_bytes, fresh=True)
        return self._open(entry, frame_tokens)

    def _open(self, entry: ShardEntry, frame_tokens: int) -> None:
        if self._remote is None:
            size = os.fstat(self._descriptor).st_size
            if size != entry.size_bytes:
                raise self._damage_error(
                    "file", f"has {size} bytes, but {entry.size_bytes} were written"
                )
        if self._read_bytes("head", 0, len(MAGIC)) != MAGIC:
            raise self._damage_error("head", "does not start like a shard")
        # The file is checked from its end: trailer, footer, table; frames follow on demand.
        footer, footer_offset = self._read_footer(entry)
        if footer.frame_tokens != frame_tokens:
            raise self._damage_error("footer", "the frame size differs from the index")
        table_bytes = footer.frames * FRAME.itemsize
        table_offset = footer_offset - table_bytes
        if table_offset < len(MAGIC):
            raise self._damage_error("footer", "the frame table does not fit in the file")
        raw = self._read_bytes("frame table", table_offset, table_bytes)
        if checksum(raw) != footer.table_checksum:
            raise self._damage_error("frame table", "checksum mismatch")
        table = np.frombuffer(raw, FRAME)
        bounds = np.concatenate(([len(MAGIC)], len(MAGIC) + np.cumsum(table["size"], dtype="i8")))
        if bounds[-1] != table_offset or table["ends"].sum(dtype="i8") != footer.documents:
            raise self._damage_error("frame table", "does not match the frames")
        if table["ends"].max() > footer.frame_tokens:
            raise self._damage_error("frame table", "a frame has more documents than tokens")
        if table["position"].max() >= footer.tokens:
            raise self._damage_error("frame table", "a frame starts past the tokens of the shard")
        self.footer, self.table, self.offsets = footer, table, bounds[:-1]
        self._frames_end = table_offset

    def _read_footer(self, entry: ShardEntry) -> tuple[Footer, int]:
        trailer_offset = entry.size_bytes - TRAILER.size
        expected, size, mark = TRAILER.unpack(
            self._read_bytes("trailer", trailer_offset, TRAILER.size)
        )
        if mark != TRAILER_MARK or expected != entry.footer_checksum:
            raise self._damage_error("trailer", "differs from the index")
        if size > trailer_offset - len(MAGIC):
            raise self._damage_error(
                "trailer", f"declares {size} bytes of footer, more than the file has"
            )
        encoded = self._read_bytes("footer", trailer_offset - size, size)
        if checksum(encoded) != expected:
            raise self._damage_error("footer", "checksum mismatch")
        try:
            footer = msgspec.msgpack.decode(encoded, type=Footer)
        except ValueError as error:
            raise self._damage_error("footer", str(error)) from error
        if (footer.tokens, footer.documents) != (entry.tokens, entry.documents):
            raise self._damage_error("footer", "the totals differ from the index")
        return footer, trailer_offset - size

    def _read_bytes(self, part: str, offset: int, size: int, *, fresh: bool = False) -> bytes:
        try:
            if self._remote is not None:
                content = self._remote.read(offset, offset + size, fresh=fresh)
            else:
                content = os.pread(self._descriptor, size, offset)
        except OSError as error:
            raise self._damage_error(part, f"cannot be read: {error.strerror}") from error
        if len(content) != size:
            raise self._damage_error(part, f"has {len(content)} of its {size} bytes")
        return content

    def _damage_error(self, part: str, problem: str) -> DamageError:
        return DamageError(self.path, part, problem)
