"""Caches of decoded frames, in the memory of a process or in a file that local processes share.

Processes that read the same split all need every frame of a window, for a few rows each. With a
shared file, a frame is decompressed and checked once per machine, by the first process that needs
it. Locks are not needed: a slot that another process is writing fails its checksum, and the reader
then decodes the frame itself.
"""

import logging
import os
import stat
import struct
import weakref
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ms_data.disk.format import checksum
from ms_data.disk.shard import Frame
from ms_data.errors import SettingError

_HEADER = struct.Struct("<QQQII")
"""Checksum (of the body, seeded with the checksum of the other fields), frame number, position,
tokens, ends."""
_TOKENS_PER_END = 4
"""A slot has space for one document end per four tokens; fuller frames are not cached."""
_log = logging.getLogger(__name__)


class FrameCache(Protocol):
    """A cache of decoded frames."""

    def get(self, number: int) -> Frame | None:
        """Return frame `number` of the split if it is cached."""

    def put(self, number: int, frame: Frame) -> None:
        """Cache a frame; may evict another."""


class LRUFrameCache:
    """LRU cache of the frames of this process.

    Args:
        capacity: maximum number of frames.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._frames: OrderedDict[int, Frame] = OrderedDict()

    def get(self, number: int) -> Frame | None:
        """Return frame `number` of the split if it is cached."""
        frame = self._frames.get(number)
        if frame is not None:
            self._frames.move_to_end(number)
        return frame

    def put(self, number: int, frame: Frame) -> None:
        """Cache a frame; evicts the least recently used one if the cache is full."""
        self._frames[number] = frame
        if len(self._frames) > self._capacity:
            self._frames.popitem(last=False)


class SharedFrameCache:
    """Frame cache in one file; the frame number determines the slot.

    The file belongs to this user. Every process removes the file name when it ends; processes that
    have the file open can still use it. A file left behind by a killed process is reused.

    Args:
        folder: folder on this machine, ideally in memory, such as /dev/shm.
        name: name of the split, unique to the data.
        frame_tokens: maximum tokens per frame.
        token_type: type of a token.
        size_bytes: maximum file size; there is at least one slot.

    Raises:
        SettingError: the file cannot be created in the folder, or belongs to another user.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        frame_tokens: int,
        token_type: DTypeLike,
        size_bytes: int,
    ) -> None:
        self._token_type = np.dtype(token_type).newbyteorder("<")
        body_bytes = frame_tokens * self._token_type.itemsize + frame_tokens // _TOKENS_PER_END * 8
        self._slot_bytes = _HEADER.size + body_bytes
        # Frame n always uses slot n modulo the number of slots.
        self._slots = max(1, size_bytes // self._slot_bytes)
        self._frame_tokens = frame_tokens
        self._last: tuple[int, Frame] | None = None  # consecutive rows often need the same frame
        self._writable = True
        # With another number of slots, frames are at other offsets, so the name includes it.
        path = folder / f"{name}.{self._slots}.frames"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise SettingError(
                f"shared_cache: {path} cannot be opened: {error.strerror}; use a writable folder"
                " on this machine, such as /dev/shm"
            ) from error
        self._finalizer = weakref.finalize(
            self, _close_and_unlink, self._descriptor, path, os.getpid()
        )
        # In a folder for all users, such as /dev/shm, another user may have created the file.
        info = os.fstat(self._descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise SettingError(
                f"shared_cache: {path} is not a file of this user; remove it or use another folder"
            )

    def get(self, number: int) -> Frame | None:
        """Return frame `number` of the split if its slot holds it intact."""
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        frame = self._read(number)
        if frame is not None:
            self._last = number, frame
        return frame

    def _read(self, number: int) -> Frame | None:
        offset = self._offset(number)
        try:
            header = os.pread(self._descriptor, _HEADER.size, offset)
            if len(header) < _HEADER.size:
                return None
            expected, cached_number, position, tokens, ends = _HEADER.unpack(header)
            size = tokens * self._token_type.itemsize + ends * 8
            # Before the body is read: the header of a slot being written may claim any size.
            if cached_number != number or not tokens or size > self._slot_bytes - _HEADER.size:
                return None
            body = np.empty(size, np.uint8)
            if os.preadv(self._descriptor, [body.data], offset + _HEADER.size) != size:
                return None
        except OSError:
            return None
        if checksum(body.data, seed=checksum(header[8:])) != expected:
            return None
        stop = tokens * self._token_type.itemsize
        bounds: NDArray[np.int64] = np.frombuffer(body, "<i8", ends, stop)
        return Frame(np.frombuffer(body, self._token_type, tokens), bounds, position)

    def put(self, number: int, frame: Frame) -> None:
        """Store a frame in its slot, replacing any other frame."""
        self._last = number, frame
        body = frame.tokens.astype(self._token_type, copy=False).tobytes()
        body += frame.ends.astype("<i8", copy=False).tobytes()
        if not self._writable or len(body) > self._slot_bytes - _HEADER.size:
            return
        # The checksum covers header and body, so a reader notices any concurrent write.
        header = _HEADER.pack(0, number, frame.position, len(frame.tokens), len(frame.ends))[8:]
        expected = checksum(body, seed=checksum(header)).to_bytes(8, "little")
        try:
            os.pwritev(self._descriptor, [expected, header, body], self._offset(number))
        except OSError as error:
            self._writable = False
            _log.warning("decoded frames are no longer shared: %s", error.strerror)

    def _offset(self, number: int) -> int:
        return number % self._slots * self._slot_bytes


def _close_and_unlink(descriptor: int, path: Path, process: int) -> None:
    """Close the file, and unlink its path unless the path already belongs to another file."""
    if os.getpid() != process:  # in a forked child; the parent still uses the file
        return
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
            path.unlink()
    os.close(descriptor)
