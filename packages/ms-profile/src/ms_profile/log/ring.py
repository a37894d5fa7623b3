"""`Ring`: the last spans of a process in a memory-mapped file, which outlives `kill -9`.

The file has one page of header, a table of names, and `capacity` slots of 32 bytes that are written
round and round. A span takes its slot when it begins and is completed in place, so that a killed or
hung process shows what it was inside of. The number of a record is the last of its bytes to be
written; a slot torn by a kill can only be the one after the newest, which readers leave out.
"""

import itertools
import mmap
import os
import struct
import threading
from enum import IntEnum
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import Final

import numpy as np
from attrs import frozen
from msgspec import structs
from numpy.typing import NDArray

from ms_profile.clocks.clock_pair import ClockPair, read_clocks
from ms_profile.errors import FormatError, RecordError
from ms_profile.files.untrusted import check_path, open_file, read_bytes

MAGIC: Final = b"MSRING01"
HEADER: Final = struct.Struct("<8sIIIIQqqq")
SLOT: Final = struct.Struct("<QQiHHQ")
"""Start, end, step, name, kind and (in the higher byte) thread, number; see `SLOT_DTYPE`."""
PAGE: Final = 4096
NAMES_BYTES: Final = 1 << 18
SLOTS: Final = PAGE + NAMES_BYTES
ENDS: Final = SLOTS + 8
LARGEST_BYTES: Final = 1 << 30
MOST_NS: Final = 1 << 62
LONGEST_NS: Final = 10 * 366 * 86_400 * 1_000_000_000
"""A longer recording, ten years, is taken for a damaged time."""
END: Final = struct.Struct("<Q")
# Bound once: a span is begun and ended in half a microsecond, of which each look-up is a tenth.
pack_slot: Final = SLOT.pack_into
pack_end: Final = END.pack_into
SLOT_DTYPE: Final = np.dtype(
    [
        ("start_ns", "<u8"),
        ("end_ns", "<u8"),
        ("step", "<i4"),
        ("name", "<u2"),
        ("kind", "u1"),
        ("thread", "u1"),
        ("number", "<u8"),
    ]
)


class Kind(IntEnum):
    """What a span measures."""

    STEP = 1
    """From the first forward of a step to that of the next."""
    FORWARD = 2
    """A model called from outside."""
    MODULE = 3
    """A block inside a model."""
    OPTIMIZER = 4
    COLLECTIVE = 5
    """As the host sees it: on gloo the whole collective, on a device's stream its launch."""
    DATA = 6
    """The wait for the next batch."""
    GARBAGE = 7
    """A collection by Python's garbage collector."""
    BETWEEN = 8
    """From the optimizer's last step to the next forward: data, logging, checkpoints."""
    BACKWARD = 9
    """From the end of a step's last forward to the optimizer."""
    OTHER = 10


class Ring:
    """Record spans of this process into a file; `span = ring.begin(name, kind); ring.end(span)`.

    Names are registered once with `name`. Recording is safe from any thread that holds the
    interpreter's lock. A forked child writes into memory of its own once it has called `abandon`.

    Args:
        path: the file to make; its folder is made if missing.
        capacity: spans kept; 32 bytes each.
        rank: whose spans these are.

    Raises:
        RecordError: the file cannot be made at its full size.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, capacity: int = 1 << 16, rank: int = 0
    ) -> None:
        check_path("path", path, error=RecordError, written="file")
        self.path = Path(path)
        self.capacity = capacity
        self.step = 0
        """The step written into each record."""
        self._map = _make_file(self.path, PAGE + NAMES_BYTES + capacity * SLOT.size)
        clock = read_clocks()
        own = (capacity, NAMES_BYTES, rank, 0, os.getpid())
        HEADER.pack_into(self._map, 0, MAGIC, *own, *structs.astuple(clock))
        self._names: dict[str, int] = {}
        self._names_end = PAGE
        self._threads: dict[int, int] = {}
        """The number of each thread in the higher byte, by its identity."""
        self._count = itertools.count()
        self._newest = -1
        self._lock = threading.Lock()

    def name(self, text: str) -> int:
        """Register a name and return its number; once the table is full, all new ones share 0."""
        number = self._names.get(text)
        return self._register(text) if number is None else number

    def begin(self, name: int, kind: int) -> int:
        """Begin a span now; the result is to be given to `end`."""
        number = next(self._count)
        self._newest = number
        pack_slot(
            self._map,
            SLOTS + number % self.capacity * 32,
            monotonic_ns(),
            0,
            self.step,
            name,
            kind | (self._threads.get(get_ident()) or self._thread()),
            number + 1,
        )
        return number

    def end(self, number: int) -> None:
        """End a span now; one so old that its slot was taken since is left out."""
        if self._newest - number < self.capacity:
            pack_end(self._map, ENDS + number % self.capacity * 32, monotonic_ns())

    def record(
        self, name: int, kind: int, start_ns: int, end_ns: int, *, step: int | None = None
    ) -> None:
        """Record a span that is over, of `step` or the current one; monotonic instants in ns."""
        number = next(self._count)
        self._newest = number
        place = SLOTS + number % self.capacity * 32
        step = self.step if step is None else step
        pack_slot(self._map, place, start_ns, end_ns, step, name, kind, number + 1)

    def close(self) -> None:
        """Write the file out to disk and let go of it."""
        self._map.flush()
        self._map.close()

    def abandon(self) -> None:
        """Leave the file, in a forked child, to the parent; what is still recorded goes nowhere."""
        self._map = mmap.mmap(-1, PAGE + NAMES_BYTES + self.capacity * SLOT.size)
        self._lock = threading.Lock()

    def _thread(self) -> int:
        return self._threads.setdefault(get_ident(), min(len(self._threads) + 1, 255) << 8)

    def _register(self, text: str) -> int:
        with self._lock:
            if text in self._names:
                return self._names[text]
            encoded = text.encode()[:512]
            end = self._names_end + 2 + len(encoded)
            if end + 2 > PAGE + NAMES_BYTES or len(self._names) >= 0xFFFF:
                return 0
            # The length comes last: a name is seen whole or not at all.
            self._map[self._names_end + 2 : end] = encoded
            struct.pack_into("<H", self._map, self._names_end, len(encoded))
            self._names_end = end
            self._names[text] = len(self._names) + 1
            return self._names[text]


@frozen(kw_only=True, eq=False)
class RingRecording:
    """What a ring held, oldest first."""

    rank: int
    pid: int
    clock: ClockPair
    names: tuple[str, ...]
    """By number; number 0 stands for names that found no room."""
    spans: NDArray[np.void]
    """(N,) of `SLOT_DTYPE`; `end_ns` 0 where the span had not ended; instants are monotonic."""
    dropped: int
    """Older spans that were written over."""

    def name_of(self, number: int) -> str:
        """Return the text of a name."""
        return self.names[number] if number < len(self.names) else "?"


def is_ring(path: Path | str) -> bool:
    """Return whether a file begins as a ring does; one that cannot be opened does not."""
    try:
        with open_file(path, error=FormatError) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (FormatError, OSError, ValueError):
        return False


def read_ring(path: Path | str) -> RingRecording:
    """Read a ring's file, of a live process too.

    Spans whose instants cannot be, as in a damaged file, are left out.

    Raises:
        FormatError: the file is no ring, is cut short, or cannot be read.
    """
    check_path("a ring", path, error=FormatError)
    data = read_bytes(path, error=FormatError, limit_bytes=LARGEST_BYTES)
    if len(data) < PAGE or data[:8] != MAGIC:
        raise FormatError(f"{path} is no ring file; its first bytes are {data[:8]!r}")
    _, capacity, names_bytes, rank, _, pid, monotonic, wall, error = HEADER.unpack_from(data)
    start = PAGE + names_bytes
    if len(data) < start + capacity * SLOT.size:
        raise FormatError(f"{path} is cut short: {len(data)} bytes of a ring of {capacity} spans")
    clock = ClockPair(monotonic, wall, error)
    if not 0 <= monotonic < MOST_NS or not 0 <= wall < MOST_NS:
        raise FormatError(f"{path} is damaged: its clocks read {monotonic} and {wall} ns")
    slots = np.frombuffer(data, SLOT_DTYPE, capacity, start)
    written = slots[_can_be(slots, monotonic)]
    newest = int(written["number"].max()) if len(written) else 0
    # The slot after the newest may be torn; it is the oldest once the ring has gone round.
    whole = written[written["number"] + capacity > newest + (newest >= capacity)]
    return RingRecording(
        rank=rank,
        pid=pid,
        clock=clock,
        names=_names(data[PAGE:start]),
        spans=whole[np.argsort(whole["number"])],
        dropped=max(newest - capacity, 0) + (newest >= capacity),
    )


def _can_be(slots: NDArray[np.void], opened_ns: int) -> NDArray[np.bool_]:
    """Return whether each slot was written and holds a number and instants fit for this ring."""
    start, end, number = slots["start_ns"], slots["end_ns"], slots["number"]
    late = np.uint64(opened_ns + LONGEST_NS)
    found: NDArray[np.bool_] = (number > 0) & (number < MOST_NS) & (start < late)
    found &= (end == 0) | ((end >= start) & (end < late))
    return found


def _names(table: bytes) -> tuple[str, ...]:
    found = ["(name table full)"]
    position = 0
    while position + 2 <= len(table) and (
        size := int.from_bytes(table[position : position + 2], "little")
    ):
        found.append(table[position + 2 : position + 2 + size].decode(errors="replace"))
        position += 2 + size
    return tuple(found)


def _make_file(path: Path, size: int) -> mmap.mmap:
    """Map a new file whose space is reserved: a write to a hole on a full disk would be fatal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink()
        raise RecordError(f"{path} cannot take {size} bytes: {error}; free some space") from error
    finally:
        os.close(descriptor)
