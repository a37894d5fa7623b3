"""Series of a run, downsampled to at most 2,048 buckets each, in an index saved next to its log.

A bucket has the minimum, maximum and mean of consecutive points. When all buckets are full, pairs
are merged, so a run of any length takes bounded memory and no peak is lost.
"""

import logging
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from ms_profile.errors import FormatError
from ms_profile.files.untrusted import open_file, read_bytes
from ms_profile.log.blocks import Block, scan_blocks
from ms_profile.log.event_log import ARRAY, Event
from ms_profile.log.event_reader import (
    ReadState,
    decode_events,
    event_files_so_far,
    new_blocks,
)
from ms_profile.log.json_lines import MAX_LINE_BYTES, NAME, event_of_line
from ms_profile.log.manifest import write_atomically

logger = logging.getLogger(__name__)
INDEX: Final = "live.index"
CAPACITY: Final = 2048
MAX_SERIES: Final = 512
MAX_SAMPLES: Final = 60
MAX_SPANS: Final = 400
MAX_LANES: Final = 64
MAX_TEXT: Final = 4000
MAX_INDEX_BYTES: Final = 1 << 27
CHECKSUM_BYTES: Final = 4
SAVE_INTERVAL_S: Final = 20.0
READ_BYTES: Final = 1 << 20
PREVIEW_BYTES: Final = 1 << 17
PREVIEW_PARTS: Final = 40
ROWS: Final = ("step", "wall_s", "low", "high", "sum", "count")
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
DAMAGE: Final = (ValueError, RecursionError)


class Series:
    """Values of one field over the run: rows (6, buckets) of `ROWS`."""

    def __init__(self) -> None:
        self.rows = np.zeros((len(ROWS), 64))
        self.width = 1
        """Points per bucket."""
        self.points = 0
        self.last = (0.0, float("nan"))
        """Step and value of the newest point."""

    def append(self, step: NDArray[Any], wall_s: NDArray[Any], value: NDArray[Any]) -> None:
        """Append points, (N,) float64 each; non-finite values count as missing."""
        value = np.where(np.isfinite(value), value, np.nan)
        self.last = (float(step[-1]), float(value[-1]))
        start = 0
        while start < len(value):
            if self.points == CAPACITY * self.width:
                self._merge_pairs()
            end = min(len(value), start + CAPACITY * self.width - self.points)
            self._fill(step[start:end], wall_s[start:end], value[start:end])
            start = end

    def _fill(self, step: NDArray[Any], wall_s: NDArray[Any], value: NDArray[Any]) -> None:
        bucket = (self.points + np.arange(len(value))) // self.width
        first, last = int(bucket[0]), int(bucket[-1])
        if last >= self.rows.shape[1]:
            added = min(CAPACITY, 2 * last + 2) - self.rows.shape[1]
            self.rows = np.pad(self.rows, ((0, 0), (0, added)))
        edges = np.flatnonzero(np.diff(bucket, prepend=first - 1))
        finite = ~np.isnan(value)
        chunk = np.stack([
            step[edges], wall_s[edges], np.fmin.reduceat(value, edges),
            np.fmax.reduceat(value, edges), np.add.reduceat(np.where(finite, value, 0.0), edges),
            np.add.reduceat(finite.astype(float), edges),
        ])  # fmt: skip
        if self.points % self.width:  # the first bucket already has points
            old = self.rows[:, first]
            chunk[:2, 0] = old[:2]
            chunk[2, 0], chunk[3, 0] = np.fmin(chunk[2, 0], old[2]), np.fmax(chunk[3, 0], old[3])
            chunk[4:, 0] += old[4:]
        self.rows[:, first : last + 1] = chunk
        self.points += len(value)

    def _merge_pairs(self) -> None:
        self.rows = _merge(self.rows, np.arange(0, CAPACITY, 2))
        self.width *= 2

    def reduced(self, buckets: int) -> NDArray[np.float64]:
        """Return the rows merged to at most `buckets` columns."""
        used = -(-self.points // self.width)
        rows = self.rows[:, :used]
        if used <= buckets:
            return rows
        return _merge(rows, np.unique(np.linspace(0, used, buckets, endpoint=False).astype(int)))


def _merge(rows: NDArray[np.float64], edges: NDArray[Any]) -> NDArray[np.float64]:
    """Merge the columns between the edges."""
    return np.stack([
        rows[0, edges], rows[1, edges], np.fmin.reduceat(rows[2], edges),
        np.fmax.reduceat(rows[3], edges), np.add.reduceat(rows[4], edges),
        np.add.reduceat(rows[5], edges),
    ])  # fmt: skip


class _SavedSeries(Struct, frozen=True):
    rank: Count
    kind: str
    field: str
    width: Annotated[int, Meta(ge=1, le=1 << 40)]
    points: Count
    last: tuple[float, float]
    rows: bytes


class _SavedFile(Struct, frozen=True):
    name: str
    offset: Count
    blocks: Count
    """Number of blocks read, numbered from 0."""


class _SavedIndex(Struct, frozen=True, kw_only=True, tag="ms-profile.live.1", tag_field="format"):
    files: list[_SavedFile]
    series: list[_SavedSeries]
    samples: list[Event]
    spans: list[tuple[Count, str, list[tuple[float, float, float]]]]
    status: dict[str, Event]
    events: Count
    last_wall_s: float


class EventSummary:
    """Series, samples and recent spans of events."""

    def __init__(self) -> None:
        self.series: dict[tuple[int, str, str], Series] = {}
        self.samples: deque[Event] = deque(maxlen=MAX_SAMPLES)
        """Events of kind `sample`, newest last."""
        self.spans: dict[tuple[int, str], deque[tuple[float, float, float]]] = {}
        """Start, duration and data wait in seconds of the newest spans, by rank and lane."""
        self.status: dict[str, Event] = {}
        """Newest event of each kind that starts or ends a run."""
        self.last_wall_s = 0.0
        """Time of the newest event, in seconds since 1970."""
        self.events = 0
        self.omitted_series = 0

    def add(self, events: Sequence[Event]) -> None:
        """Add events in file order."""
        self.events += len(events)
        self.last_wall_s = max(self.last_wall_s, events[-1].wall_ns / 1e9 if events else 0.0)
        for (rank, kind), group in groupby(events, attrgetter("rank", "kind")):
            batch = list(group)
            if kind == "sample":
                self.samples.extend(_shortened(event) for event in batch[-MAX_SAMPLES:])
            elif kind in ("begin", "run_start", "resume", "end", "run_end"):
                self.status[kind] = _shortened(batch[-1])
            self._add_spans(rank, kind, batch[-MAX_SPANS:])
            self._add_values(rank, kind, batch)

    def _add_values(self, rank: int, kind: str, batch: list[Event]) -> None:
        """Append the numeric fields of events of one rank and kind; the fields usually agree."""
        wall_s = np.array([event.wall_ns for event in batch], np.float64) / 1e9
        step = np.array([_step(event) for event in batch], np.float64)
        size = len(batch[0].fields)
        names = _numeric(batch[0].fields)
        if names and all(len(event.fields) == size for event in batch):
            try:
                values = np.array([itemgetter(*names)(e.fields) for e in batch], np.float64)
            except (KeyError, ValueError, OverflowError):
                pass
            else:
                columns = values.reshape(len(batch), len(names)).T
                for name, column in zip(names, columns, strict=True):
                    self._append((rank, kind, name), step, wall_s, column)
                return
        points: dict[str, list[tuple[int, float]]] = {}
        for index, event in enumerate(batch):
            for name in _numeric(event.fields):
                points.setdefault(name, []).append((index, _float(event.fields[name])))
        for name, pairs in points.items():
            rows = np.array([index for index, _ in pairs])
            value = np.array([number for _, number in pairs], np.float64)
            self._append((rank, kind, name), step[rows], wall_s[rows], value)

    def _append(
        self, key: tuple[int, str, str], step: NDArray[Any], wall_s: NDArray[Any],
        value: NDArray[Any],
    ) -> None:  # fmt: skip
        series = self.series.get(key)
        if series is None:
            if len(self.series) >= MAX_SERIES:
                self.omitted_series += 1
                return
            series = self.series[key] = Series()
        # Events without a step are numbered.
        step = np.where(np.isnan(step), series.points + np.arange(len(step)), step)
        series.append(step, wall_s, value)

    def _add_spans(self, rank: int, kind: str, batch: list[Event]) -> None:
        """Add the durations of events: `step_time_s` of steps and `seconds` of others.

        A span ends `ended_ago_s` before its event, which may be logged later.
        """
        for event in batch:
            seconds = event.fields.get("step_time_s" if kind == "step" else "seconds")
            if not isinstance(seconds, int | float) or not 0 <= seconds < 1e7:
                continue
            worker = event.fields.get("generator", "")
            lane = f"{kind} {worker}".strip()[:80]
            spans = self.spans.get((rank, lane))
            if spans is None:
                if len(self.spans) >= MAX_LANES:
                    return
                spans = self.spans[rank, lane] = deque(maxlen=MAX_SPANS)
            end_s = event.wall_ns / 1e9 - _seconds(event, "ended_ago_s")
            spans.append((end_s - seconds, float(seconds), _seconds(event, "data_wait_s")))


def _seconds(event: Event, name: str) -> float:
    """Return a field if it is a valid duration, or 0."""
    value = event.fields.get(name, 0.0)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e7 else 0.0


class RunIndex(EventSummary):
    """Summary of one run that follows its logs and is saved next to them.

    Args:
        folder: folder with event files, their subfolder `events`, or `events.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._states: dict[Path, ReadState] = {}
        self._saved_s = time.monotonic()
        self._dirty = False
        self._preview: EventSummary | None = None
        self._restore()

    def update(self, budget_s: float = 0.25) -> bool:
        """Read new events for about `budget_s` seconds; return True if more are waiting."""
        deadline = time.monotonic() + budget_s
        for events in self._new_events():
            self.add(events)
            self._dirty = True
            if time.monotonic() > deadline:
                return True
        if self._dirty and time.monotonic() - self._saved_s > SAVE_INTERVAL_S:
            self.save()
        return False

    @property
    def progress(self) -> float:
        """Fraction of the log's bytes read so far, 0 to 1."""
        sizes = {path: _size(path) for path in self._paths()}
        total = sum(sizes.values())
        done = sum(min(self._states[path].offset, size)
                   for path, size in sizes.items() if path in self._states)  # fmt: skip
        return done / total if total else 1.0

    def _paths(self) -> list[Path]:
        paths = event_files_so_far(self.folder)
        lines = self.folder / NAME
        paths = [*paths, lines] if lines.is_file() else paths
        # A link could point outside the served folder.
        return [path for path in paths if not path.is_symlink()]

    def _new_events(self) -> Iterator[Sequence[Event]]:
        for path in self._paths():
            state = self._states.setdefault(path, ReadState())
            if path.name == NAME:
                yield from _new_lines(path, state)
                continue
            for block in new_blocks(path, state):
                if block.content.startswith(ARRAY):
                    try:
                        yield decode_events(block.content)
                    except DAMAGE:
                        logger.warning("%s has a block without events", path.name)

    def preview(self) -> EventSummary | None:
        """Return a summary of evenly spaced blocks while a long log is read for the first time."""
        if self.progress > 0.98:
            self._preview = None
            return None
        if self._preview is None:
            self._preview = EventSummary()
            for path in event_files_so_far(self.folder):
                self._preview.add(_sampled_events(path))
        return self._preview

    def save(self) -> None:
        """Write the index next to the log, if the folder is writable."""
        self._saved_s, self._dirty = time.monotonic(), False
        files = [_SavedFile(path.name, state.offset, len(state.seen))
                 for path, state in self._states.items() if path.name != NAME
                 and state.seen == set(range(len(state.seen)))]  # fmt: skip
        if len(files) < len(self._states):  # JSON lines and damaged logs are read again
            return
        series = [
            _SavedSeries(*key, item.width, item.points, item.last,
                         item.rows[:, : -(-item.points // item.width)].astype("<f8").tobytes())
            for key, item in self.series.items()
        ]  # fmt: skip
        saved = _SavedIndex(files=files, series=series, samples=list(self.samples),
                            spans=[(*key, list(items)) for key, items in self.spans.items()],
                            status=self.status, events=self.events,
                            last_wall_s=self.last_wall_s)  # fmt: skip
        try:
            content = msgspec.msgpack.encode(saved)
            checksum = zlib.crc32(content).to_bytes(CHECKSUM_BYTES, "big")
            write_atomically(self._index_path(), checksum + content)
        except OSError as error:
            logger.info("cannot save the index of %s: %s", self.folder, error)

    def _index_path(self) -> Path:
        paths = event_files_so_far(self.folder)
        return (paths[0].parent if paths else self.folder) / INDEX

    def _restore(self) -> None:
        path = self._index_path()
        if not path.is_file():
            return
        try:
            content = read_bytes(path, error=FormatError, limit_bytes=MAX_INDEX_BYTES)
            checksum, content = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
            if zlib.crc32(content) != int.from_bytes(checksum, "big"):
                raise ValueError("its checksum is wrong")
            saved = msgspec.msgpack.decode(content, type=_SavedIndex)
            series = {(item.rank, item.kind, item.field): _restored(item) for item in saved.series}
        except (FormatError, *DAMAGE) as error:
            logger.info("reading %s again: %s", self.folder, error)
            return
        sizes = {path.name: _size(path) for path in event_files_so_far(self.folder)}
        # Rotation may remove a file, but a file that shrank belongs to another run.
        shrank = any(sizes.get(file.name, file.offset) < file.offset for file in saved.files)
        if shrank or len(series) > MAX_SERIES:
            return
        for file in saved.files:
            state = self._states[path.parent / file.name] = ReadState()
            state.offset, state.seen = file.offset, set(range(file.blocks))
        self.series, self.status, self.events = series, dict(saved.status), saved.events
        self.samples.extend(saved.samples)
        self.spans = {(rank, lane): deque(items, MAX_SPANS) for rank, lane, items in saved.spans}
        self.last_wall_s = saved.last_wall_s


def _restored(saved: _SavedSeries) -> Series:
    series = Series()
    rows = np.frombuffer(saved.rows, "<f8").reshape(len(ROWS), -1).astype(np.float64)
    if rows.shape[1] != -(-saved.points // saved.width) or rows.shape[1] > CAPACITY:
        raise ValueError(f"the index of {saved.field} is damaged")
    series.rows, series.width, series.points = rows, saved.width, saved.points
    series.last = saved.last
    return series


def _numeric(fields: dict[str, Any]) -> tuple[str, ...]:
    return tuple(
        name for name, value in fields.items()
        if name != "step" and isinstance(value, int | float)
    )  # fmt: skip


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def _step(event: Event) -> float:
    step = event.step if event.step is not None else event.fields.get("rollout")
    return float(step) if isinstance(step, int) and abs(step) < 1 << 53 else float("nan")


def _shortened(event: Event) -> Event:
    """Return the event with strings cut to 4,000 characters and at most 40 fields."""
    fields = {name[:80]: value[:MAX_TEXT] if isinstance(value, str) else value
              for name, value in list(event.fields.items())[:40]}  # fmt: skip
    return msgspec.structs.replace(event, fields=fields)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed by rotation
        return 0


def _sampled_events(path: Path) -> list[Event]:
    """Decode one block in each of 40 evenly spaced parts of a file."""
    events: list[Event] = []
    size = _size(path)
    with open_file(path, error=FormatError) as file:
        for offset in np.linspace(0, max(size - PREVIEW_BYTES, 0), PREVIEW_PARTS).astype(int):
            file.seek(int(offset))
            blocks = scan_blocks(file.read(PREVIEW_BYTES))
            block = next((part for part in blocks if isinstance(part, Block)
                          and part.content.startswith(ARRAY)), None)  # fmt: skip
            try:
                events += decode_events(block.content) if block is not None else ()
            except DAMAGE:
                continue
    return events


def _new_lines(path: Path, state: ReadState) -> Iterator[list[Event]]:
    """Yield the events of complete lines of `events.jsonl` after `state`, about 1 MiB at a time."""
    with open_file(path, error=FormatError) as file:
        if _size(path) < state.offset:  # replaced by a new file
            state.offset = 0
        file.seek(state.offset)
        while data := file.read(READ_BYTES):
            end = data.rfind(b"\n") + 1
            if not end:
                if len(data) < MAX_LINE_BYTES:  # the writer is in the middle of a line
                    return
                end = len(data)
            events = []
            for line in data[:end].splitlines():
                try:
                    events.append(event_of_line(line))
                except (msgspec.MsgspecError, *DAMAGE):
                    logger.debug("%s has a line that is not an event", path)
            state.offset += end
            file.seek(state.offset)
            if events:
                yield events
