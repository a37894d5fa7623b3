"""Event files read back: merged over ranks, filtered, or followed while they grow."""

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

from ms_profile.clocks.alignment import ClockFit
from ms_profile.errors import FormatError
from ms_profile.files.untrusted import check_path, decoding, open_file, read_bytes
from ms_profile.log.blocks import Block, Damage, scan_blocks
from ms_profile.log.event_log import ARRAY, SUFFIX, Event

logger = logging.getLogger(__name__)
LARGEST_FILE_BYTES: Final = 1 << 30
LARGEST_READ_BYTES: Final = 1 << 26
DAMAGE: Final = (ValueError, RecursionError)
"""What decoding raises over what is no record, no UTF-8, or nested too deeply."""
decode_events: Final = msgspec.msgpack.Decoder(list[Event]).decode
Problem = Callable[[str], None]


@frozen(kw_only=True)
class EventFilter:
    """Which events to keep; an empty filter keeps all."""

    kinds: Collection[str] | None = field(default=None)
    """Kinds to keep."""
    ranks: Collection[int] | None = field(default=None)
    """Ranks to keep."""
    first_step: int | None = field(default=None)
    """Events of earlier steps, and without a step, are dropped."""
    last_step: int | None = field(default=None)
    """Events of later steps, and without a step, are dropped."""
    since_ns: int | None = field(default=None)
    """Wall time (ns since 1970) before which events are dropped."""

    def keeps(self, event: Event) -> bool:
        """Return whether an event passes."""
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
    wanted: EventFilter | None = None,
    *,
    clocks: Mapping[int, ClockFit] | None = None,
    on_problem: Problem = logger.warning,
) -> Iterator[Event]:
    """Yield the events of all ranks by wall time.

    Args:
        folder: an `EventLog`'s folder, or an `ms-profile run`'s output folder.
        wanted: which events to keep.
        clocks: fits by `align_clocks` of the ranks' wall clocks; events are ordered, and their
            `wall_ns` given, on the reference's clock.
        on_problem: called with a sentence on each damaged file; what can be read is yielded.

    Raises:
        FormatError: there are no event files.
    """
    kept = wanted or EventFilter()
    by_rank: dict[int, list[Path]] = {}
    for path in event_files(folder):
        found = EVENT_FILE.fullmatch(path.name)
        by_rank.setdefault(int(found[1]) if found else 0, []).append(path)
    streams = [
        _rank_events(paths, kept, (clocks or {}).get(rank), on_problem)
        for rank, paths in by_rank.items()
        if kept.ranks is None or rank in kept.ranks
    ]
    return heapq.merge(*streams, key=lambda event: event.wall_ns)


EVENT_FILE: Final = re.compile(r"rank-([0-9]{1,9})\..*" + re.escape(SUFFIX))


def event_files(folder: Path | str) -> list[Path]:
    """Find the event files of a folder, or of its subfolder `events`, by rank and age.

    Raises:
        FormatError: there are none.
    """
    check_path("a log", folder, error=FormatError)
    root = Path(folder)
    name = f"rank-[0-9]*{SUFFIX}"
    with decoding(root, error=FormatError):
        found = sorted(root.glob(name)) or sorted(root.glob(f"events/{name}"))
        found = [path for path in found if EVENT_FILE.fullmatch(path.name) and path.is_file()]
    if not found:
        raise FormatError(f"{folder} holds no event files (rank-*{SUFFIX}); give a log's folder")
    return found


def follow_events(
    folder: Path | str,
    wanted: EventFilter | None = None,
    *,
    poll_s: float = 0.2,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Yield events as they are flushed, those already there first; end once `until()` is true.

    A damaged stretch is warned of, once, and what follows it is read.
    """
    check_path("a log", folder, error=FormatError)
    kept = wanted or EventFilter()
    places: defaultdict[Path, _Place] = defaultdict(_Place)
    while True:
        ending = until()
        fresh: list[Event] = []
        for path in event_files_so_far(folder):
            events = _new_events(path, places[path])
            fresh += [event for event in events if kept.keeps(event)]
        if kept.ranks is not None:
            fresh = [event for event in fresh if event.rank in kept.ranks]
        yield from sorted(fresh, key=lambda event: event.wall_ns)
        if ending:
            return
        time.sleep(poll_s)


def event_files_so_far(folder: Path | str) -> list[Path]:
    """Return the event files of a folder that may not be there yet."""
    try:
        return event_files(folder)
    except FormatError:
        return []


class _Place:
    """How far a growing file was read."""

    def __init__(self) -> None:
        self.offset = 0
        self.seen: set[int] = set()
        """Numbers of its blocks so far."""


def _new_events(path: Path, place: _Place) -> list[Event]:
    """Read the events of the whole blocks from a place on, and move it; a torn tail waits."""
    try:
        with open_file(path, error=FormatError) as file:
            file.seek(place.offset)
            data = file.read(LARGEST_READ_BYTES)
    except FileNotFoundError:
        return []
    events: list[Event] = []
    position = 0
    for found in scan_blocks(data):
        if isinstance(found, Damage):
            if found.torn:
                break
            where, size = place.offset + found.start, found.end - found.start
            logger.warning(
                "%s is damaged at byte %d; %d bytes are left out", path.name, where, size
            )
        elif found.number not in place.seen:
            place.seen.add(found.number)
            decoded = _decode(found)
            if decoded is None:
                logger.warning("%s holds a block that is none of events", path.name)
            events += decoded or ()
        position = found.end
    place.offset += position
    return events


def _rank_events(
    paths: list[Path], wanted: EventFilter, clock: ClockFit | None, on_problem: Problem
) -> Iterator[Event]:
    for path in paths:
        if not path.exists():  # rotated away since it was listed
            continue
        try:
            data = read_bytes(path, error=FormatError, limit_bytes=LARGEST_FILE_BYTES)
        except FormatError as error:
            on_problem(str(error))
            continue
        seen: set[int] = set()
        damaged = False
        for found in scan_blocks(data):
            if isinstance(found, Damage):
                damaged = True
                what = "ends inside a block" if found.torn else "is damaged"
                size = found.end - found.start
                on_problem(f"{path.name} {what} at byte {found.start}; {size} bytes are left out")
                continue
            if found.number in seen:
                on_problem(f"{path.name} repeats a block, up to byte {found.end}; it is left out")
                continue
            seen.add(found.number)
            events = _decode(found)
            if events is None:
                on_problem(
                    f"{path.name} holds a block that is none of events, up to byte {found.end}; it "
                    "is damaged, or written by a newer version"
                )
            for event in events or ():
                placed = event if clock is None else _placed(event, clock)
                if wanted.keeps(placed):
                    yield placed
        lost = max(seen, default=-1) + 1 - len(seen)
        if lost and not damaged:  # what is damaged has been told of
            on_problem(f"{path.name} lacks {lost} of its blocks; their events are lost")


def _placed(event: Event, clock: ClockFit) -> Event:
    wall_ns = int(clock.correct(np.array([event.wall_ns], dtype=np.int64))[0])
    return msgspec.structs.replace(event, wall_ns=wall_ns)


def _decode(block: Block) -> list[Event] | None:
    """Return a block's events, none of a file's first, which holds a `Segment`; None if damaged."""
    if not block.content.startswith(ARRAY):
        return []
    try:
        return decode_events(block.content)
    except DAMAGE:
        return None
