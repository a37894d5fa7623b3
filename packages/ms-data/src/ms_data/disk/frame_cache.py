"""Keeps decoded frames: of one process in its memory, or in a file that local processes share.

Processes that read the same split each need all frames of a window, for a few rows of each. With a
shared file a frame is decompressed and checked once a machine: whoever needs it first leaves it
there. Nobody waits or locks: a slot that another process is writing fails its checksum, and the
reader decodes the frame itself.
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

_HEAD = struct.Struct("<QQQII")
"""Checksum (of the body, seeded with that of the rest), frame, position, tokens, ends."""
_ROOM_FOR_ENDS = 4
"""A slot has room for one document end per so many tokens; a frame with more is not shared."""
_log = logging.getLogger(__name__)


class FrameCache(Protocol):
    """A cache of decoded frames."""

    def get(self, number: int) -> Frame | None:
        """The frame of this number in the split, if it is there."""

    def put(self, number: int, frame: Frame) -> None:
        """Keep a frame, perhaps in another's place."""


class LastUsedFrames:
    """The frames that this process used most recently.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._frames: OrderedDict[int, Frame] = OrderedDict()

    def get(self, number: int) -> Frame | None:
        """The frame of this number in the split, if it is there."""
        frame = self._frames.get(number)
        if frame is not None:
            self._frames.move_to_end(number)
        return frame

    def put(self, number: int, frame: Frame) -> None:
        """Keep a frame in place of the least recently used one."""
        self._frames[number] = frame
        if len(self._frames) > self._most:
            self._frames.popitem(last=False)


class SharedFrames:
    """Frames in one file, each in the slot that follows from its number.

    The file is this user's alone. Each process that ends removes its name; those that have it open
    go on with it. A file that a killed process left is used again.

    Args:
        folder: on this machine, best in memory, such as /dev/shm.
        name: of the split; other data have other names.
        frame_tokens: most tokens in a frame.
        token_type: of its tokens.
        size_bytes: of the file at most; at least one slot.

    Raises:
        SettingError: the folder cannot hold the file, or a file of that name is another's.
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
        self._type = np.dtype(token_type).newbyteorder("<")
        most = frame_tokens * self._type.itemsize + frame_tokens // _ROOM_FOR_ENDS * 8
        self._slot_bytes = _HEAD.size + most
        self._slots = max(1, size_bytes // self._slot_bytes)
        self._frame_tokens = frame_tokens
        self._last: tuple[int, Frame] | None = None
        self._writable = True
        path = folder / f"{name}.{self._slots}.frames"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise SettingError(
                f"shared_cache: {path} cannot be opened: {error.strerror}; give a folder of this"
                " machine that can be written, such as /dev/shm"
            ) from error
        self._finalizer = weakref.finalize(self, _leave, self._descriptor, path, os.getpid())
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise SettingError(
                f"shared_cache: {path} is not a file of this user; remove it, or give another"
                " folder"
            )

    def get(self, number: int) -> Frame | None:
        """The frame of this number in the split, if its slot holds it whole."""
        if self._last is not None and self._last[0] == number:
            return self._last[1]
        found = self._read(number)
        if found is not None:
            self._last = number, found
        return found

    def _read(self, number: int) -> Frame | None:
        offset = self._offset(number)
        try:
            head = os.pread(self._descriptor, _HEAD.size, offset)
            if len(head) < _HEAD.size:
                return None
            expected, held, position, tokens, ends = _HEAD.unpack(head)
            size = tokens * self._type.itemsize + ends * 8
            if held != number or not tokens or size > self._slot_bytes - _HEAD.size:
                return None
            body = np.empty(size, np.uint8)
            if os.preadv(self._descriptor, [body.data], offset + _HEAD.size) != size:
                return None
        except OSError:
            return None
        if checksum(body.data, seed=checksum(head[8:])) != expected:
            return None
        stop = tokens * self._type.itemsize
        bounds: NDArray[np.int64] = np.frombuffer(body, "<i8", ends, stop)
        return Frame(np.frombuffer(body, self._type, tokens), bounds, position)

    def put(self, number: int, frame: Frame) -> None:
        """Keep a frame in its slot, whatever lay there."""
        self._last = number, frame
        body = frame.tokens.astype(self._type, copy=False).tobytes()
        body += frame.ends.astype("<i8", copy=False).tobytes()
        if not self._writable or len(body) > self._slot_bytes - _HEAD.size:
            return
        head = _HEAD.pack(0, number, frame.position, len(frame.tokens), len(frame.ends))[8:]
        expected = checksum(body, seed=checksum(head)).to_bytes(8, "little")
        try:
            os.pwritev(self._descriptor, [expected, head, body], self._offset(number))
        except OSError as error:
            self._writable = False
            _log.warning("decoded frames are no longer shared: %s", error.strerror)

    def _offset(self, number: int) -> int:
        return number % self._slots * self._slot_bytes


def _leave(descriptor: int, path: Path, process: int) -> None:
    """Close the file, and remove its name if it is still this file's."""
    if os.getpid() != process:  # a fork, whose parent goes on with it
        return
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False)):
            path.unlink()
    os.close(descriptor)
