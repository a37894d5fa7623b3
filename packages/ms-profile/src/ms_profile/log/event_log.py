"""`EventLog`: a rank's events, in a file of its own that outlives its process.

Records gather in memory and are flushed as one compressed block when 64 KiB or one second of them
have come together, by the caller or by a thread that sleeps in between. A flush is one `write`;
what was flushed is in the page cache and outlives `kill -9` (not a power cut; `close` syncs).
The disk space is bounded: a file that grew to `segment_bytes` is followed by the next, and the
oldest beyond `segments` is removed.
"""

import atexit
import errno
import itertools
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ms_profile.clocks.clock_pair import ClockPair, read_clocks
from ms_profile.errors import EventError, number_in_environment
from ms_profile.files.untrusted import check_path
from ms_profile.log.blocks import pack_block

logger = logging.getLogger(__name__)
Value = int | float | str
FLUSH_BYTES: Final = 1 << 16
MOST_PENDING_BYTES: Final = 1 << 22
SUFFIX: Final = ".events"
ARRAY: Final = b"\xdd"
"""What a block of events starts with: msgpack's array of 32-bit length."""
LARGEST_EVENT_BYTES: Final = 1 << 20


class Event(Struct, frozen=True, array_like=True):
    """One record of one rank."""

    rank: Annotated[int, Meta(ge=0, lt=1 << 31)]
    kind: str
    step: int | None
    """The field `step`, where there is one."""
    monotonic_ns: int
    wall_ns: int
    fields: dict[str, Value]
    """All fields as given, `step` included."""


class Segment(Struct, frozen=True, kw_only=True, tag="ms-profile.events.1", tag_field="format"):
    """The first block of each event file: whose it is, and its clocks when it was opened."""

    rank: int
    world_size: int
    host: str
    pid: int
    number: int
    clock: ClockPair


class StepMetrics(Struct, frozen=True, kw_only=True):
    """The fields of an event of kind `step`; those that were not measured are None."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: int | None = None
    rate_tokens_per_s: float | None = None
    mfu: float | None = None
    """Model FLOPs utilisation, 0 to 1."""
    memory_bytes: int | None = None
    data_wait_s: float | None = None
    step_time_s: float | None = None

    @classmethod
    def of(cls, event: Event) -> "StepMetrics":
        """Read an event's fields; unknown ones are left aside.

        Raises:
            EventError: a field has the wrong type, or `step` is missing.
        """
        try:
            return msgspec.convert(event.fields, cls, strict=False)
        except msgspec.ValidationError as error:
            raise EventError(f"event {event.kind!r} of rank {event.rank}: {error}") from error


class EventLog:
    """Record events of this process: `log("step", {"step": 1, "loss": 2.3})`.

    Fits the `on_event=` seam of the trainers. Safe to call from any thread. A disk that is full
    or removed does not stop the training: it is warned of, up to 4 MiB wait for room, and what is
    given up is counted in `lost`.

    Args:
        folder: where the files `rank-00000.000000.events` go; made if missing.
        rank: whose events these are; the environment's `RANK`, or 0.
        world_size: likewise from `WORLD_SIZE`, or 1.
        flush_interval_s: how much time may be lost to a kill.
        segment_bytes: size at which a new file is begun.
        segments: how many files are kept.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        flush_interval_s: float = 1.0,
        segment_bytes: int = 1 << 26,
        segments: int = 16,
    ) -> None:
        if segments < 1 or segment_bytes < 1 or flush_interval_s <= 0:
            raise EventError(
                f"segments={segments}, segment_bytes={segment_bytes}, flush_interval_s="
                f"{flush_interval_s}: all must be positive"
            )
        check_path("folder", folder, error=EventError, written="folder")
        self.folder = Path(folder)
        self.rank = number_in_environment("RANK", 0) if rank is None else rank
        self.lost = 0
        """Events that could not be written."""
        self._world_size = (
            number_in_environment("WORLD_SIZE", 1) if world_size is None else world_size
        )
        self._interval_s, self._limit_bytes, self._keep = flush_interval_s, segment_bytes, segments
        self._encoder = msgspec.msgpack.Encoder()
        # One object holds all that is pending: a signal handler may record between two lines.
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._failing = False
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._descriptor = -1
        self._numbers: Iterator[int] = itertools.count()
        """Numbers of the blocks of the file that is being written."""
        self._unused: list[int] = []
        """Numbers of blocks that could not be written; the next ones have them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = sorted(self.folder.glob(f"rank-{self.rank:05d}.*{SUFFIX}"))
        self._number = int(own[-1].name.split(".")[1]) + 1 if own else 0
        self._open()
        self._flusher = threading.Thread(target=self._flush_often, daemon=True, name="ms-profile")
        self._flusher.start()
        atexit.register(self.close)

    def __call__(self, kind: str, fields: Mapping[str, Value]) -> None:
        """Record one event.

        Raises:
            EventError: a value is no int, float or str; or the log belongs to another process.
        """
        values = {name: _plain(kind, name, value) for name, value in fields.items()}
        step = values.get("step")
        event = Event(
            self.rank,
            kind,
            step if isinstance(step, int) else None,
            time.monotonic_ns(),
            time.time_ns(),
            values,
        )
        encoded = self._encoder.encode(event)
        if len(encoded) > LARGEST_EVENT_BYTES:
            raise EventError(f"event {kind!r} takes {len(encoded)} bytes; the most is 1 MiB")
        if os.getpid() != self._pid:
            raise EventError(
                f"this log was opened by process {self._pid} and called in {os.getpid()}; "
                "open one in each process"
            )
        with self._lock:
            if self._descriptor < 0:
                raise EventError(f"the log of rank {self.rank} is closed; open another")
            self._pending.append(encoded)
            self._pending_bytes += len(encoded)
            if self._pending_bytes >= (MOST_PENDING_BYTES if self._failing else FLUSH_BYTES):
                self.flush()

    def flush(self) -> None:
        """Write what has gathered, so that it outlives this process."""
        with self._lock:
            if not self._pending or self._descriptor < 0 or os.getpid() != self._pid:
                return
            taken, self._pending = self._pending, []
            taken_bytes, self._pending_bytes = self._pending_bytes, 0
            content = b"".join((ARRAY, struct.pack(">I", len(taken)), *taken))
            try:
                if not os.fstat(self._descriptor).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "the log was removed", str(self.folder))
                if self._size >= self._limit_bytes:
                    self._rotate()
                self._append(content)
            except OSError as error:
                if not self._failing:
                    logger.warning("events of rank %d cannot be written: %s", self.rank, error)
                self._failing = True
                if self._stop.is_set() or taken_bytes > MOST_PENDING_BYTES:
                    self.lost += len(taken)
                else:  # there may be room again when the flusher comes by
                    self._pending = taken + self._pending
                    self._pending_bytes += taken_bytes
            else:
                self._failing = False

    def close(self) -> None:
        """Flush, sync to disk and close; further calls do nothing."""
        if os.getpid() != self._pid:
            return
        self._stop.set()
        with self._lock:
            if self._descriptor < 0:
                return
            self.flush()
            descriptor, self._descriptor = self._descriptor, -1
            try:
                os.fsync(descriptor)
            except OSError as error:
                logger.warning("events of rank %d may not be on the disk: %s", self.rank, error)
            finally:
                os.close(descriptor)
        atexit.unregister(self.close)

    def __enter__(self) -> "EventLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The file that is being written."""
        return self._path(self._number)

    def _path(self, number: int) -> Path:
        return self.folder / f"rank-{self.rank:05d}.{number:06d}{SUFFIX}"

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self._path(self._number), flags, 0o644)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._size = descriptor, 0
        self._numbers, self._unused = itertools.count(), []
        segment = Segment(
            rank=self.rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            pid=self._pid,
            number=self._number,
            clock=read_clocks(),
        )
        self._append(self._encoder.encode(segment))

    def _rotate(self) -> None:
        self._number += 1
        self._open()
        if (oldest := self._number - self._keep) >= 0:
            self._path(oldest).unlink(missing_ok=True)

    def _append(self, content: bytes) -> None:
        """Write a block whole, or take back what was written of it."""
        # A signal handler may append too, in the middle of this: each step is one of Python's own.
        number = self._unused.pop() if self._unused else next(self._numbers)
        block = pack_block(content, number)
        try:
            written = 0
            while written < len(block):
                written += os.write(self._descriptor, block[written:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            self._unused.append(number)
            raise
        self._size += len(block)

    def _flush_often(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.flush()


def _plain(kind: str, name: str, value: object) -> Value:
    """Turn a value, also a scalar of numpy or torch, into one of the types that records hold."""
    if isinstance(value, int | float | str):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 1) == 0:
        inner = item()
        if isinstance(inner, int | float | str):
            return inner
    raise EventError(
        f"event {kind!r}, field {name!r}: {type(value).__name__} is no int, float or str; "
        "give a plain number or text"
    )
