"""Read event files: merged over ranks, filtered, or followed as they grow."""

import heapq
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from attrs import field, frozen

from ms_profile.arguments import check_callable, check_number, check_type
from ms_profile.clocks.alignment import ClockFit
from ms_profile.errors import FormatError
from ms_profile.files.untrusted import check_path, decoding, open_file, read_bytes
from ms_profile.log.blocks import Block, Damage, scan_blocks
from ms_profile.log.event_log import ARRAY, SUFFIX, Event

logger = logging.getLogger(__name__)
MAX_FILE_BYTES: Final = 1 << 30
READ_BYTES: Final = 1 << 18
MAX_READ_BYTES: Final = 1 << 26
"""Bytes of a growing file in memory at once: usually the first, for a damaged file the second."""
DAMAGE: Final = (ValueError, RecursionError)
"""Errors of decoding a block that has no records, is not UTF-8, or is nested too deeply."""
decode_events: Final = msgspec.msgpack.Decoder(list[Event]).decode
Problem = Callable[[str], None]


@frozen(kw_only=True)
class EventFilter:
    """Filter for events; the default keeps all."""

    kinds: Collection[str] | None = field(default=None)
    """Kinds to keep. None: all."""
    ranks: Collection[int] | None = field(default=None)
    """Ranks to keep. None: all."""
    first_step: int | None = field(default=None)
    """Drop events of earlier steps and events without a step."""
    last_step: int | None = field(default=None)
    """Drop events of later steps and events without a step."""
    since_ns: int | None = field(default=None)
    """Drop events before this wall-clock time in ns since 1970."""

    def keeps(self, event: Event) -> bool:
        """Return whether an event passes the filter, except for its rank."""
        if self.kinds is not None and event.kind not in self.kinds:
            return False
        if self.since_ns is not None and event.wall_ns < self.since_ns:
            return False
        if self.first_step is None and self.last_step is None:
            return True
        if event.step is None or (self.first_step is not None and event.step < self.first_step):
            return False
        return self.last_step is None or event.step <= self.last_step


def read_events(
    folder: Path | str,
    event_filter: EventFilter | None = None,
    *,
    clocks: Mapping[int, ClockFit] | None = None,
    on_problem: Problem = logger.warning,
) -> Iterator[Event]:
    """Yield the events of all ranks in order of wall-clock time.

    Args:
        folder: folder of an `EventLog`, or output folder of `ms-profile run`.
        event_filter: events to yield. None: all.
        clocks: fits of the ranks' wall clocks from `align_clocks`; if set, events are ordered by
            the reference clock and their `wall_ns` converted to it.
        on_problem: called with a message about each damaged file; readable events are yielded.

    Raises:
        FormatError: the folder has no event files, or an argument has the wrong type.
    """
    selection = _selection(event_filter)
    check_type(
        "clocks", clocks, Mapping, "a dict of ClockFit by rank", error=FormatError, optional=True
    )
    by_rank: dict[int, list[Path]] = {}
    for path in event_files(folder):
        match = EVENT_FILE.fullmatch(path.name)
        by_rank.setdefault(int(match[1]) if match else 0, []).append(path)
    streams = [
        _rank_events(paths, selection, (clocks or {}).get(rank), on_problem)
        for rank, paths in by_rank.items()
        if selection.ranks is None or rank in selection.ranks
    ]
    # Each rank's events are already in order, so the streams are merged lazily.
    return heapq.merge(*streams, key=lambda event: event.wall_ns)


def _selection(event_filter: EventFilter | None) -> EventFilter:
    check_type(
        "event_filter",
        event_filter,
        EventFilter,
        "an EventFilter",
        error=FormatError,
        optional=True,
    )
    return event_filter or EventFilter()


EVENT_FILE: Final = re.compile(r"rank-([0-9]{1,9})\..*" + re.escape(SUFFIX))


def event_files(folder: Path | str) -> list[Path]:
    """Return the event files in a folder or its subfolder `events`, by rank and age.

    Raises:
        FormatError: the folder has none.
    """
    check_path("a log", folder, error=FormatError)
    root = Path(folder)
    name = f"rank-[0-9]*{SUFFIX}"
    with decoding(root, error=FormatError):
        paths = sorted(root.glob(name)) or sorted(root.glob(f"events/{name}"))
        paths = [path for path in paths if EVENT_FILE.fullmatch(path.name) and path.is_file()]
    if not paths:
        raise FormatError(f"{folder} has no event files (rank-*{SUFFIX}); pass a log's folder")
    return paths


def follow_events(
    folder: Path | str,
    event_filter: EventFilter | None = None,
    *,
    poll_s: float = 0.2,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Yield existing events, then new ones as they are flushed, until `until()` is true.

    Damaged ranges are skipped with a warning.

    Args:
        folder: folder of an `EventLog`, or output folder of `ms-profile run`; may not exist yet.
        event_filter: events to yield. None: all.
        poll_s: seconds between reads.
        until: condition to stop; events flushed before it became true are still yielded.
    """
    check_path("a log", folder, error=FormatError)
    selection = _selection(event_filter)
    check_number("poll_s", poll_s, minimum=0, error=FormatError)
    check_callable("until", until, error=FormatError)
    states: defaultdict[Path, ReadState] = defaultdict(ReadState)
    while True:
        # Before reading, so that events flushed before the end are still read after it.
        is_last = until()
        new_events: list[Event] = []
        for path in event_files_so_far(folder):
            events = _new_events(path, states[path])
            new_events += [event for event in events if selection.keeps(event)]
        if selection.ranks is not None:
            new_events = [event for event in new_events if event.rank in selection.ranks]
        yield from sorted(new_events, key=lambda event: event.wall_ns)
        if is_last:
            return
        time.sleep(poll_s)


def event_files_so_far(folder: Path | str) -> list[Path]:
    """Return the event files of a folder that may not exist yet."""
    try:
        return event_files(folder)
    except FormatError:
        return []


class ReadState:
    """How far a growing file has been read."""

    __slots__ = ("offset", "seen")

    def __init__(self) -> None:
        self.offset = 0
        self.seen: set[int] = set()
        """Numbers of the blocks read so far."""


def _new_events(path: Path, state: ReadState) -> list[Event]:
    """Read the events of all complete blocks after `state`, and advance it; a torn tail waits."""
    events: list[Event] = []
    for block in new_blocks(path, state):
        decoded = _decode(block)
        if decoded is None:
            logger.warning("%s has a block without events", path.name)
        events += decoded or ()
    return events


def new_blocks(path: Path, state: ReadState) -> Iterator[Block]:
    """Yield the complete blocks after `state` and advance it; an incomplete last block is left.

    The caller may stop early and continue later. Damaged ranges are skipped with a warning.
    """
    try:
        file = open_file(path, error=FormatError)
    except FileNotFoundError:
        return
    with file:
        file.seek(state.offset)
        data = b""
        while True:
            # A block may be larger than one read: without progress, double the data.
            chunk = file.read(max(READ_BYTES, len(data)))
            data += chunk
            is_last = not chunk or len(data) >= MAX_READ_BYTES
            position = 0
            for part in scan_blocks(data):
                if isinstance(part, Damage):
                    # The writer, or the next read, may complete this block.
                    if part.torn or (part.end == len(data) and not is_last):
                        break
                    logger.warning(
                        "%s is damaged at byte %d; skipping %d bytes",
                        path.name, state.offset, part.end - part.start,
                    )  # fmt: skip
                state.offset += part.end - position
                position = part.end
                if isinstance(part, Block) and part.number not in state.seen:
                    state.seen.add(part.number)
                    yield part
            if not chunk:
                return
            data = data[position:]


def _rank_events(
    paths: list[Path], selection: EventFilter, clock: ClockFit | None, on_problem: Problem
) -> Iterator[Event]:
    for path in paths:
        if not path.exists():  # removed by rotation since it was listed
            continue
        try:
            data = read_bytes(path, error=FormatError, limit_bytes=MAX_FILE_BYTES)
        except FormatError as error:
            on_problem(str(error))
            continue
        seen: set[int] = set()
        damaged = False
        for part in scan_blocks(data):
            if isinstance(part, Damage):
                damaged = True
                problem = "ends inside a block" if part.torn else "is damaged"
                size = part.end - part.start
                on_problem(f"{path.name} {problem} at byte {part.start}; skipping {size} bytes")
                continue
            if part.number in seen:
                on_problem(f"{path.name} repeats a block, up to byte {part.end}; skipping it")
                continue
            seen.add(part.number)
            events = _decode(part)
            if events is None:
                on_problem(
                    f"{path.name} has a block without events, up to byte {part.end}; it is "
                    "damaged, or was written by a newer version"
                )
            for event in events or ():
                corrected = event if clock is None else _on_reference(event, clock)
                if selection.keeps(corrected):
                    yield corrected
        # Block numbers count from 0 in each file, so every gap is a lost block.
        lost = max(seen, default=-1) + 1 - len(seen)
        if lost and not damaged:  # damage was reported above
            on_problem(f"{path.name} lacks {lost} blocks; their events are lost")


def _on_reference(event: Event, clock: ClockFit) -> Event:
    wall_ns = int(clock.correct(np.array([event.wall_ns], dtype=np.int64))[0])
    return msgspec.structs.replace(event, wall_ns=wall_ns)


def _decode(block: Block) -> list[Event] | None:
    """Return a block's events; [] for a file's first block, a `Segment`; None if damaged."""
    if not block.content.startswith(ARRAY):
        return []
    try:
        return decode_events(block.content)
    except DAMAGE:
        return None
