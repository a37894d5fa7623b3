"""`Ring`: the last spans of a process in a memory-mapped file, which survives `kill -9`.

The file has a header page, a table of names, and `capacity` slots of 32 bytes, used as a ring
buffer. A span takes its slot when it begins and is completed in place, so a killed or hung process
shows the spans that it was in. A record's number is the last of its bytes to be written; only the
slot after the newest can be torn by a kill, and readers skip that slot.
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
# Magic, capacity, size of the name table, rank, reserved, process id, and the `ClockPair`.
HEADER: Final = struct.Struct("<8sIIIIQqqq")
SLOT: Final = struct.Struct("<QQiHHQ")
"""Start, end, step, name, kind and thread (in the high byte), number; see `SLOT_DTYPE`."""
PAGE: Final = 4096
NAMES_BYTES: Final = 1 << 18
SLOTS: Final = PAGE + NAMES_BYTES
ENDS: Final = SLOTS + 8  # the end is the second field of a slot
MAX_BYTES: Final = 1 << 30
MAX_NS: Final = 1 << 62
MAX_RECORDING_NS: Final = 10 * 366 * 86_400 * 1_000_000_000
"""Times more than ten years after the start are damaged."""
END: Final = struct.Struct("<Q")
# Bound once: a span takes half a microsecond, and each attribute lookup is a tenth of that.
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
    """Kind of a span."""

    STEP = 1
    """From the first forward of a step to the first forward of the next."""
    FORWARD = 2
    """Forward of a whole model."""
    MODULE = 3
    """Forward of a submodule, or of a model during recomputation."""
    OPTIMIZER = 4
    COLLECTIVE = 5
    """Collective as seen by the host: its full time on gloo, only its launch on a device."""
    DATA = 6
    """Wait for the next batch."""
    GARBAGE = 7
    """Run of Python's garbage collector."""
    BETWEEN = 8
    """From the last optimizer step to the next forward: data, logging, checkpoints."""
    BACKWARD = 9
    """From the end of a step's last forward to the optimizer step."""
    OTHER = 10


class Ring:
    """Record spans of this process into a file: `span = ring.begin(name, kind); ring.end(span)`.

    Names are registered once with `name`. Any thread that holds the GIL may record. After
    `abandon`, a forked child records into private memory.

    Args:
        path: file to create; its folder is created if missing.
        capacity: number of spans that the ring holds, 32 bytes each.
        rank: rank of this process.

    Raises:
        RecordError: the file cannot be created at its full size.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, capacity: int = 1 << 16, rank: int = 0
    ) -> None:
        check_path("path", path, error=RecordError, written="file")
        self.path = Path(path)
        self.capacity = capacity
        self.step = 0
        """Step number stored with each new record."""
        self._map = _make_file(self.path, PAGE + NAMES_BYTES + capacity * SLOT.size)
        clock = read_clocks()
        geometry = (capacity, NAMES_BYTES, rank, 0, os.getpid())
        HEADER.pack_into(self._map, 0, MAGIC, *geometry, *structs.astuple(clock))
        self._names: dict[str, int] = {}
        self._names_end = PAGE
        self._threads: dict[int, int] = {}
        """Thread numbers, shifted to the high byte, by thread identity."""
        self._count = itertools.count()
        self._newest = -1
        self._lock = threading.Lock()

    def name(self, text: str) -> int:
        """Register a name and return its id; once the table is full, new names get id 0."""
        number = self._names.get(text)
        return self._register(text) if number is None else number

    def begin(self, name: int, kind: int) -> int:
        """Begin a span now; return its number for `end`."""
        # Atomic under the GIL, so no two threads get the same slot and no lock is needed.
        number = next(self._count)
        self._newest = number
        pack_slot(
            self._map,
            SLOTS + number % self.capacity * 32,
            monotonic_ns(),
            0,
            self.step,
            name,
            kind | (self._threads.get(get_ident()) or self._thread()),  # thread in the high byte
            number + 1,  # written last; 0 marks an empty slot
        )
        return number

    def end(self, number: int) -> None:
        """End a span now; does nothing if its slot has been reused."""
        if self._newest - number < self.capacity:
            pack_end(self._map, ENDS + number % self.capacity * 32, monotonic_ns())

    def record(
        self, name: int, kind: int, start_ns: int, end_ns: int, *, step: int | None = None
    ) -> None:
        """Record a finished span; monotonic times in ns, `step` defaults to the current one."""
        number = next(self._count)
        self._newest = number
        offset = SLOTS + number % self.capacity * 32
        step = self.step if step is None else step
        pack_slot(self._map, offset, start_ns, end_ns, step, name, kind, number + 1)

    def close(self) -> None:
        """Flush the file to disk and unmap it."""
        self._map.flush()
        self._map.close()

    def abandon(self) -> None:
        """Leave the file to the parent, in a forked child; later records are discarded."""
        # Anonymous memory of the same size, so that spans that are still open can end in it.
        self._map = mmap.mmap(-1, PAGE + NAMES_BYTES + self.capacity * SLOT.size)
        # Another thread of the parent may have held the old lock during the fork.
        self._lock = threading.Lock()

    def _thread(self) -> int:
        # The number is one byte: from the 255th thread on, all share the last.
        return self._threads.setdefault(get_ident(), min(len(self._threads) + 1, 255) << 8)

    def _register(self, text: str) -> int:
        with self._lock:
            if text in self._names:
                return self._names[text]
            encoded = text.encode()[:512]
            end = self._names_end + 2 + len(encoded)
            # A zero length must remain after the last name: it ends the table.
            if end + 2 > PAGE + NAMES_BYTES or len(self._names) >= 0xFFFF:
                return 0
            # The length is written last, so that readers see a complete name or none.
            self._map[self._names_end + 2 : end] = encoded
            struct.pack_into("<H", self._map, self._names_end, len(encoded))
            self._names_end = end
            self._names[text] = len(self._names) + 1
            return self._names[text]


@frozen(kw_only=True, eq=False)
class RingRecording:
    """Contents of a ring, oldest first."""

    rank: int
    pid: int
    clock: ClockPair
    names: tuple[str, ...]
    """Names by id; id 0 is used for names that did not fit into the table."""
    spans: NDArray[np.void]
    """(N,) of `SLOT_DTYPE`, monotonic times; `end_ns` is 0 for spans that had not ended."""
    dropped: int
    """Number of older spans that were overwritten."""

    def name_of(self, number: int) -> str:
        """Return the name with an id."""
        return self.names[number] if number < len(self.names) else "?"


def is_ring(path: Path | str) -> bool:
    """Return whether a file starts with the ring's magic; False if it cannot be opened."""
    try:
        with open_file(path, error=FormatError) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (FormatError, OSError, ValueError):
        return False


def read_ring(path: Path | str) -> RingRecording:
    """Read a ring file, also of a running process.

    Spans with impossible times, as in a damaged file, are skipped.

    Raises:
        FormatError: the file is not a ring, is truncated, or cannot be read.
    """
    check_path("a ring", path, error=FormatError)
    data = read_bytes(path, error=FormatError, limit_bytes=MAX_BYTES)
    if len(data) < PAGE or data[:8] != MAGIC:
        raise FormatError(f"{path} is not a ring file; its first bytes are {data[:8]!r}")
    _, capacity, names_bytes, rank, _, pid, monotonic, wall, error = HEADER.unpack_from(data)
    start = PAGE + names_bytes
    # The sizes come from the file's own header, so a truncated file must be detected here.
    if len(data) < start + capacity * SLOT.size:
        raise FormatError(
            f"{path} is truncated: a ring of {capacity} spans must have more than {len(data)} bytes"
        )
    clock = ClockPair(monotonic, wall, error)
    if not 0 <= monotonic < MAX_NS or not 0 <= wall < MAX_NS:
        raise FormatError(f"{path} is damaged: its clocks read {monotonic} and {wall} ns")
    slots = np.frombuffer(data, SLOT_DTYPE, capacity, start)
    written = slots[_is_valid(slots, monotonic)]
    newest = int(written["number"].max()) if len(written) else 0
    # The slot after the newest may be torn; once the ring is full, that slot is the oldest.
    complete = written[written["number"] + capacity > newest + (newest >= capacity)]
    return RingRecording(
        rank=rank,
        pid=pid,
        clock=clock,
        names=_names(data[PAGE:start]),
        spans=complete[np.argsort(complete["number"])],
        dropped=max(newest - capacity, 0) + (newest >= capacity),
    )


def _is_valid(slots: NDArray[np.void], opened_ns: int) -> NDArray[np.bool_]:
    """Return which slots were written and have a number and times possible for this ring."""
    start, end, number = slots["start_ns"], slots["end_ns"], slots["number"]
    limit_ns = np.uint64(opened_ns + MAX_RECORDING_NS)
    valid: NDArray[np.bool_] = (number > 0) & (number < MAX_NS) & (start < limit_ns)
    valid &= (end == 0) | ((end >= start) & (end < limit_ns))
    return valid


def _names(table: bytes) -> tuple[str, ...]:
    names = ["(name table full)"]
    position = 0
    while position + 2 <= len(table) and (
        size := int.from_bytes(table[position : position + 2], "little")
    ):
        names.append(table[position + 2 : position + 2 + size].decode(errors="replace"))
        position += 2 + size
    return tuple(names)


def _make_file(path: Path, size: int) -> mmap.mmap:
    """Map a new file with reserved space, as writing to a hole on a full disk raises SIGBUS."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink()
        raise RecordError(f"{path} needs {size} bytes: {error}; free some disk space") from error
    finally:
        os.close(descriptor)
