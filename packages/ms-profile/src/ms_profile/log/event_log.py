"""`EventLog`: a rank's events in its own files, which survive the process.

Records are buffered and written as one compressed block once 64 KiB or half a second of them have
accumulated, by the caller or by a background thread. A flush is one `write`; flushed data is in the
page cache and survives `kill -9` but not a power cut (`close` syncs). Disk usage is bounded: a file
that reached `segment_bytes` is followed by the next, and beyond `segments` the oldest is removed.
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

from ms_profile.arguments import check_integer, check_number
from ms_profile.clocks.clock_pair import ClockPair, read_clocks
from ms_profile.errors import EventError, number_in_environment
from ms_profile.files.untrusted import check_path
from ms_profile.log.blocks import pack_block

logger = logging.getLogger(__name__)
Value = int | float | str
FLUSH_BYTES: Final = 1 << 16
MAX_PENDING_BYTES: Final = 1 << 22  # limit of the events that wait while writing fails
SUFFIX: Final = ".events"
ARRAY: Final = b"\xdd"
"""First byte of a block of events: a msgpack array with 32-bit length."""
MAX_EVENT_BYTES: Final = 1 << 20


class Event(Struct, frozen=True, array_like=True):
    """One event of one rank."""

    rank: Annotated[int, Meta(ge=0, lt=1 << 31)]
    kind: str
    step: int | None
    """The field `step`, or None if the event has none."""
    monotonic_ns: int
    wall_ns: int
    fields: dict[str, Value]
    """All fields, including `step`."""


class Segment(Struct, frozen=True, kw_only=True, tag="ms-profile.events.1", tag_field="format"):
    """First block of each event file: its process, and the clocks when it was opened."""

    rank: int
    world_size: int
    host: str
    pid: int
    number: int
    clock: ClockPair


class StepMetrics(Struct, frozen=True, kw_only=True):
    """Fields of a `step` event; None for fields that were not measured."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: int | None = None
    rate_tokens_per_s: float | None = None
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1."""
    memory_bytes: int | None = None
    data_wait_s: float | None = None
    step_time_s: float | None = None

    @classmethod
    def of(cls, event: Event) -> "StepMetrics":
        """Read an event's fields; unknown fields are ignored.

        Raises:
            EventError: a field has the wrong type, or `step` is missing.
        """
        try:
            return msgspec.convert(event.fields, cls, strict=False)
        except msgspec.ValidationError as error:
            raise EventError(f"event {event.kind!r} of rank {event.rank}: {error}") from error


class EventLog:
    """Record events of this process: `log("step", {"step": 1, "loss": 2.3})`.

    Can be passed to the `on_event=` of every trainer. Thread-safe. A full disk or removed file does
    not stop the training: it is logged, up to 4 MiB of events wait for free space, and `lost`
    counts events that are dropped.

    Args:
        folder: folder for the files `rank-00000.000000.events`; created if missing.
        rank: rank of this process; default: the environment's `RANK`, or 0.
        world_size: number of processes; default: the environment's `WORLD_SIZE`, or 1.
        flush_interval_s: seconds between flushes, the time of events that a kill may lose.
        segment_bytes: size at which a new file is started.
        segments: number of files to keep.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        flush_interval_s: float = 0.5,
        segment_bytes: int = 1 << 26,
        segments: int = 16,
    ) -> None:
        check_integer("rank", rank, minimum=0, maximum=2**31 - 1, error=EventError, optional=True)
        check_integer("world_size", world_size, minimum=1, error=EventError, optional=True)
        check_integer("segments", segments, minimum=1, error=EventError)
        check_integer("segment_bytes", segment_bytes, minimum=1, error=EventError)
        check_number("flush_interval_s", flush_interval_s, minimum=1e-3, error=EventError)
        check_path("folder", folder, error=EventError, written="folder")
        self.folder = Path(folder)
        self.rank = number_in_environment("RANK", 0) if rank is None else rank
        self.lost = 0
        """Number of events that could not be written."""
        self._world_size = (
            number_in_environment("WORLD_SIZE", 1) if world_size is None else world_size
        )
        self._interval_s, self._limit_bytes, self._keep = flush_interval_s, segment_bytes, segments
        self._encoder = msgspec.msgpack.Encoder()
        # A list, as a signal handler may record an event between any two lines.
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._failing = False
        # Reentrant, as a signal handler may record while its own thread is writing.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._descriptor = -1
        self._numbers: Iterator[int] = itertools.count()
        """Block numbers of the current file."""
        self._unused: list[int] = []
        """Numbers of blocks whose writing failed, to be reused."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # A restarted rank continues the numbering and leaves the files of its predecessor.
        existing = sorted(self.folder.glob(f"rank-{self.rank:05d}.*{SUFFIX}"))
        self._number = int(existing[-1].name.split(".")[1]) + 1 if existing else 0
        self._open()
        self._flusher = threading.Thread(target=self._flush_often, daemon=True, name="ms-profile")
        self._flusher.start()
        atexit.register(self.close)

    def __call__(self, kind: str, fields: Mapping[str, Value]) -> None:
        """Record one event.

        Raises:
            EventError: a value is not an int, float or str, or another process opened the log.
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
        if len(encoded) > MAX_EVENT_BYTES:
            raise EventError(
                f"event {kind!r} must have at most 1 MiB, got {len(encoded)} bytes; shorten it"
            )
        if os.getpid() != self._pid:
            raise EventError(
                f"this log was opened by process {self._pid} and called in {os.getpid()}; "
                "open a log in each process"
            )
        with self._lock:
            if self._descriptor < 0:
                raise EventError(f"the log of rank {self.rank} is closed; open a new one")
            self._pending.append(encoded)
            self._pending_bytes += len(encoded)
            # After a failure, the flusher retries once per interval instead of every event.
            if self._pending_bytes >= (MAX_PENDING_BYTES if self._failing else FLUSH_BYTES):
                self.flush()

    def flush(self) -> None:
        """Write buffered events, so that they survive the process."""
        with self._lock:
            if not self._pending or self._descriptor < 0 or os.getpid() != self._pid:
                return
            # Taken before the write, so that a signal handler appends to the new list.
            batch, self._pending = self._pending, []
            batch_bytes, self._pending_bytes = self._pending_bytes, 0
            # msgpack's array 32: a marker, the number of elements (big-endian), and the elements.
            content = b"".join((ARRAY, struct.pack(">I", len(batch)), *batch))
            try:
                # A removed file still accepts writes, which would be lost.
                if not os.fstat(self._descriptor).st_nlink:
                    raise FileNotFoundError(errno.ENOENT, "the log was removed", str(self.folder))
                if self._size >= self._limit_bytes:
                    self._rotate()
                self._append(content)
            except OSError as error:
                if not self._failing:
                    logger.warning("cannot write events of rank %d: %s", self.rank, error)
                self._failing = True
                if self._stop.is_set() or batch_bytes > MAX_PENDING_BYTES:
                    self.lost += len(batch)
                else:  # the flusher tries again, as space may be freed
                    self._pending = batch + self._pending
                    self._pending_bytes += batch_bytes
            else:
                self._failing = False

    def close(self) -> None:
        """Flush, sync to disk and close; later calls do nothing."""
        if os.getpid() != self._pid:
            return
        # Set before the last flush: a failure then is final, and its events count as lost.
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
        """The current file."""
        return self._path(self._number)

    def _path(self, number: int) -> Path:
        return self.folder / f"rank-{self.rank:05d}.{number:06d}{SUFFIX}"

    def _open(self) -> None:
        # O_EXCL: two processes that claim the same rank must not write to one file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(self._path(self._number), flags, 0o644)
        # Closed only after the new file is open, so that a failure leaves the old one usable.
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
        """Write a complete block; on an error, truncate the file to its previous size."""
        # A signal handler may append during this; the steps on the counters are atomic in Python.
        number = self._unused.pop() if self._unused else next(self._numbers)
        block = pack_block(content, number)
        try:
            written = 0
            while written < len(block):
                written += os.write(self._descriptor, block[written:])
        except OSError:
            # A reader that sees the partial block before this takes it for a torn tail and waits.
            os.ftruncate(self._descriptor, self._size)
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            self._unused.append(number)  # readers report a missing number as lost events
            raise
        self._size += len(block)

    def _flush_often(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.flush()


def _plain(event_kind: str, name: str, value: object) -> Value:
    """Convert a value, including a numpy or torch scalar, to a plain int, float or str."""
    if isinstance(value, int | float | str):
        return value
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 1) == 0:
        scalar = item()
        if isinstance(scalar, int | float | str):
            return scalar
    raise EventError(
        f"event {event_kind!r}, field {name!r} must be an int, float or str, got "
        f"{type(value).__name__}; pass a plain number or text"
    )
