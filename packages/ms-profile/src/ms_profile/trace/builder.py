"""Records into columns: a few list comprehensions a chunk, then numpy."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ms_profile.trace.categories import categorise
from ms_profile.trace.columns import EXPORT, CollectiveNote, Memory, Thread, Trace
from ms_profile.trace.messages import first_message, note_of
from ms_profile.trace.process_groups import name_groups
from ms_profile.trace.records import MOST_NS, Record
from ms_profile.vendors.category import Category

Array = NDArray[Any]
COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {
    **dict.fromkeys(
        ("start_ns", "duration_ns", "external", "correlation", "moved_bytes"), np.int64
    ),
    **dict.fromkeys(("name", "label", "thread", "shape"), np.int32),
}
MEMORY_COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {
    **dict.fromkeys(("at_ns", "change_bytes", "allocated_bytes", "reserved_bytes"), np.int64),
    **dict.fromkeys(("device", "thread"), np.int32),
}
LONGEST_NS: Final = 10 * 86_400 * 1_000_000_000
"""A span or a trace that lasts longer than ten days is a damaged time."""
MOST_RANKS: Final = 1 << 24
MICROSECONDS: Final = re.compile(r"\s*-?[0-9]{1,16}(\.[0-9]*)?\s*")


class _Numbers(dict[Any, int]):
    """Gives each new key the next number."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class TraceBuilder:
    """Collects records chunk by chunk; `finish` sorts them into a `Trace`."""

    def __init__(self) -> None:
        self._names = _Numbers()
        self._labels = _Numbers()
        self._shapes = _Numbers({b"": 0})
        self._threads = _Numbers()
        self._process_names: dict[int | str, str] = {}
        self._thread_names: dict[tuple[int | str, int | str], str] = {}
        self._parts: dict[str, list[Array]] = {name: [] for name in COLUMNS}
        self._memory: dict[str, list[Array]] = {name: [] for name in MEMORY_COLUMNS}
        self._notes: dict[int, CollectiveNote] = {}
        self._messages: dict[int, tuple[bytes, bytes]] = {}
        self._count = 0
        self._damaged = 0

    def add(self, records: Sequence[Record]) -> None:
        """Take up the records of one chunk."""
        spans = records
        if [record.ph for record in records].count("X") < len(records):
            spans = [record for record in records if record.ph == "X"]
            self._add_others(records)
        labels = [record.cat for record in spans]
        if "Trace" in labels:  # the profiler's own frame around everything
            spans = [record for record in spans if record.cat != "Trace"]
        spans = self._with_times(spans)
        labels = [record.cat for record in spans]
        if not spans:
            return
        arguments = [record.args for record in spans]
        # One join and one split make texts of raw JSON, which holds no zero byte, at half the cost.
        shapes = b"\0".join([each.dims for each in arguments]).split(b"\0")
        count = len(spans)
        part = {
            "start_ns": _nanoseconds([record.ts for record in spans]),
            "duration_ns": _nanoseconds([record.dur for record in spans]),
            "name": _numbered(self._names, [record.name for record in spans], count),
            "label": _numbered(self._labels, labels, count),
            "thread": self._number_threads(spans),
            "external": np.fromiter([each.external for each in arguments], np.int64, count),
            "correlation": np.fromiter([each.correlation for each in arguments], np.int64, count),
            "shape": _numbered(self._shapes, shapes, count),
            "moved_bytes": np.fromiter([each.bytes_moved for each in arguments], np.int64, count),
        }
        for name, column in part.items():
            self._parts[name].append(column)
        self._note_collectives(spans, part["label"])
        self._count += count

    def _with_times(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return the events whose times, where they are texts, are numbers."""
        if not any(type(each.ts) is str or type(each.dur) is str for each in records):
            return records
        sound = [each for each in records if _is_time(each.ts) and _is_time(each.dur, least=0)]
        self._damaged += len(records) - len(sound)
        return sound

    def _number_threads(self, spans: Sequence[Record]) -> Array:
        processes = [record.pid for record in spans]
        threads = [record.tid for record in spans]
        first = processes[0], threads[0]
        if processes.count(first[0]) == threads.count(first[1]) == len(spans):
            return np.full(len(spans), self._threads[first], np.int32)
        return _numbered(self._threads, zip(processes, threads, strict=True), len(spans))

    def _note_collectives(self, spans: Sequence[Record], labels: Array) -> None:
        """Keep the messages of the few spans that are collectives."""
        kernel, scope = self._labels["kernel"], self._labels["user_annotation"]
        operator = self._labels["cpu_op"]
        for place in np.flatnonzero((labels == kernel) | (labels == scope)).tolist():
            record = spans[place]
            if record.args.collective:
                self._notes[self._count + place] = note_of(record.args)
            elif ":" in record.name and labels[place] == scope:
                self._messages[self._count + place] = (
                    bytes(record.args.dims), bytes(record.args.types),
                )  # fmt: skip
        wanted = self._names["record_param_comms"]
        names = self._parts["name"][-1]
        for place in np.flatnonzero((labels == operator) & (names == wanted)).tolist():
            if spans[place].args.collective:
                self._notes[self._count + place] = note_of(spans[place].args)

    def _add_others(self, records: Sequence[Record]) -> None:
        """Take up metadata and allocations."""
        allocations = []
        for record in records:
            phase = record.ph
            if phase == "i" and record.name == "[memory]":
                allocations.append(record)
            elif phase == "M" and record.name == "process_name":
                self._process_names[record.pid] = record.args.name
            elif phase == "M" and record.name == "thread_name":
                self._thread_names[record.pid, record.tid] = record.args.name
        allocations = list(self._with_times(allocations))
        if not allocations:
            return
        arguments = [record.args for record in allocations]
        device = [a.device_id if a.device_type > 0 else -1 for a in arguments]
        columns = {
            "at_ns": _nanoseconds([record.ts for record in allocations]),
            "change_bytes": np.array([a.size_bytes for a in arguments], np.int64),
            "allocated_bytes": np.array([a.allocated_bytes for a in arguments], np.int64),
            "reserved_bytes": np.array([a.reserved_bytes for a in arguments], np.int64),
            "device": np.array(device, np.int32),
            "thread": np.array([self._threads[r.pid, r.tid] for r in allocations], np.int32),
        }
        for name, column in columns.items():
            self._memory[name].append(column)

    def finish(
        self,
        header: dict[str, Any],
        warnings: Sequence[str],
        file_bytes: int,
        *,
        damaged: int = 0,
        name: str = "trace",
    ) -> Trace:
        """Sort what was collected by thread, start and longest first.

        Args:
            header: what stands beside the events.
            warnings: of reading the file.
            file_bytes: size of the file.
            damaged: events that were left out before.
            name: of the file, for the warning that counts what was left out.
        """
        columns = {name: _joined(self._parts.pop(name), COLUMNS[name]) for name in COLUMNS}
        kept = self._near_the_others(columns)
        threads = tuple(
            Thread(
                process=process, thread=thread,
                process_name=self._process_names.get(process, ""),
                name=self._thread_names.get((process, thread), ""),
            )
            for process, thread in self._threads
        )  # fmt: skip
        names, base_ns = tuple(self._names), _whole(header.get("baseTimeNanoseconds", 0)) or 0
        columns["start_ns"] += base_ns
        keys = (columns[key][kept] for key in ("thread", "start_ns", "duration_ns"))
        order = kept[in_order(*keys)]
        category = categorise(columns.pop("label"), columns["name"], columns["thread"],
                              tuple(self._labels), names, threads)  # fmt: skip
        # Each column is let go of as soon as its sorted copy is there.
        spans: dict[str, Any] = {key: columns.pop(key)[order] for key in tuple(columns)}
        notes = self._finish_notes(order, category)
        category = category[order]
        return Trace(
            **spans,
            category=category,
            names=names,
            shapes=tuple(shape.decode(errors="replace") for shape in self._shapes),
            threads=threads,
            memory=self._finish_memory(base_ns),
            notes=name_groups(header, names, spans["name"], spans["start_ns"], category, notes),
            warnings=(*warnings, *_count(name, damaged + self._damaged)),
            file_bytes=file_bytes,
            **_described(header),
        )

    def _near_the_others(self, columns: dict[str, Array]) -> Array:
        """Find the spans that lie in the time of the others, and count those that don't."""
        start, duration = columns["start_ns"], columns["duration_ns"]
        if not len(start):
            return np.zeros(0, np.int64)
        middle = int(np.median(start))
        near = (np.abs(start - middle) <= LONGEST_NS) & (duration <= LONGEST_NS)
        self._damaged += int(len(near) - near.sum())
        return np.flatnonzero(near)

    def _finish_memory(self, base_ns: int) -> Memory:
        columns = {name: _joined(self._memory[name], MEMORY_COLUMNS[name]) for name in self._memory}
        columns["at_ns"] += base_ns
        order = np.argsort(columns["at_ns"], kind="stable")
        return Memory(**{name: column[order] for name, column in columns.items()})

    def _finish_notes(self, order: Array, category: Array) -> dict[int, CollectiveNote]:
        position = np.full(len(category), -1)
        position[order] = np.arange(len(order))
        notes = {int(position[row]): note for row, note in self._notes.items()
                 if position[row] >= 0}  # fmt: skip
        for row, (dims, types) in self._messages.items():
            if category[row] == Category.COLLECTIVE and position[row] >= 0:
                elements, dtype = first_message(dims, types)
                notes[int(position[row])] = CollectiveNote(
                    kind="", sent_elements=elements, received_elements=elements, dtype=dtype,
                    group="", group_size=0, ranks=(),
                )  # fmt: skip
        return notes


def _joined(chunks: list[Array], dtype: type[np.integer[Any]]) -> Array:
    return np.concatenate(chunks) if chunks else np.zeros(0, dtype)


def _numbered(numbers: _Numbers, keys: Iterable[Any], count: int) -> Array:
    return np.fromiter(map(numbers.__getitem__, keys), np.int32, count)


def _is_time(value: float | str, *, least: int = -MOST_NS) -> bool:
    """Return whether a text is microseconds in bounds; a number is checked when it is decoded."""
    if not isinstance(value, str):
        return True
    return MICROSECONDS.fullmatch(value) is not None and least <= _exact(value) <= MOST_NS


def _nanoseconds(values: list[float | str]) -> Array:
    """Turn microseconds, numbers or the Ascend profiler's exact text, into whole nanoseconds."""
    if any(type(value) is str for value in values):
        return np.array([_exact(value) for value in values], np.int64)
    times = np.fromiter(values, np.float64, len(values))
    whole = np.floor(times)
    # Apart, so that microseconds since 1970 keep what digits they have.
    return whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)


def _exact(value: float | str) -> int:
    if not isinstance(value, str):
        return round(value * 1000)
    whole, _, fraction = value.strip().partition(".")
    beyond = int((fraction + "000")[:3])
    return int(whole or 0) * 1000 + (-beyond if whole.startswith("-") else beyond)


def in_order(thread: Array, start: Array, duration: Array) -> Array:
    """Return the rows by thread, then start, then longest first.

    Profilers write nearly in order of time, which a stable sort takes in one pass; so the
    durations, which have no order, are looked at only where starts are equal.
    """
    order = np.argsort(start, kind="stable")
    order = order[np.argsort(thread[order], kind="stable")]
    equal = (np.diff(start[order]) == 0) & (np.diff(thread[order]) == 0)
    tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
    rows = order[tied]
    order[tied] = rows[np.lexsort((-duration[rows], start[rows], thread[rows]))]
    return order


def _whole(value: object, *, least: int = -MOST_NS, most: int = MOST_NS) -> int | None:
    return value if isinstance(value, int) and least <= value <= most else None


def _described(header: dict[str, Any]) -> dict[str, Any]:
    """Return the rank and host of a trace, as far as its header names them."""
    place, other, host = (header.get(k) for k in ("distributedInfo", "otherData", "host_name"))
    place = place if isinstance(place, dict) else {}
    return {
        "rank": _whole(place.get("rank"), least=0, most=MOST_RANKS),
        "world_size": _whole(place.get("world_size"), least=1, most=MOST_RANKS),
        "host": host if isinstance(host, str) else "",
        "is_export": isinstance(other, dict) and other.get("producer") == EXPORT,
    }


def _count(name: str, damaged: int) -> tuple[str, ...]:
    if not damaged:
        return ()
    which = "1 damaged event was" if damaged == 1 else f"{damaged} damaged events were"
    return (
        f"{name}: {which} left out (no JSON, or a time or number that cannot be); time that "
        "they would have explained counts as idle",
    )
