"""Convert trace records to numpy columns, chunk by chunk."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ms_profile.trace.categories import categorize
from ms_profile.trace.columns import EXPORT, CollectiveMessage, Memory, Thread, Trace
from ms_profile.trace.messages import first_message, message_of
from ms_profile.trace.process_groups import name_groups
from ms_profile.trace.records import MAX_NS, TraceEvent
from ms_profile.vendors.category import Category

Array = NDArray[Any]
COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {
    **dict.fromkeys(
        ("start_ns", "duration_ns", "external", "correlation", "moved_bytes"), np.int64
    ),
    **dict.fromkeys(("name", "label", "thread", "shape"), np.int32),  # ids into tables
}
MEMORY_COLUMNS: Final[dict[str, type[np.integer[Any]]]] = {
    **dict.fromkeys(
        ("at_ns", "change_bytes", "allocated_bytes", "reserved_bytes", "address"), np.int64
    ),
    **dict.fromkeys(("device", "thread"), np.int32),
}
MAX_SPAN_NS: Final = 10 * 86_400 * 1_000_000_000
"""Spans longer than ten days, or that far from the median start, have damaged times."""
MAX_RANKS: Final = 1 << 24
# At most 16 digits, so that `int` of hostile text stays cheap; `_is_time` checks the range.
MICROSECONDS: Final = re.compile(r"\s*-?[0-9]{1,16}(\.[0-9]*)?\s*")


class _Ids(dict[Any, int]):
    """Maps each key to an integer id, assigned in order of first use."""

    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class TraceBuilder:
    """Collect records chunk by chunk; `finish` sorts them into a `Trace`."""

    def __init__(self) -> None:
        self._names = _Ids()
        self._labels = _Ids()
        self._shapes = _Ids({b"": 0})  # id 0: not recorded
        self._threads = _Ids()
        self._process_names: dict[int | str, str] = {}
        self._thread_names: dict[tuple[int | str, int | str], str] = {}
        self._parts: dict[str, list[Array]] = {name: [] for name in COLUMNS}
        self._memory: dict[str, list[Array]] = {name: [] for name in MEMORY_COLUMNS}
        # By row in file order, as rows get their final positions only in `finish`.
        self._decoded_messages: dict[int, CollectiveMessage] = {}
        self._raw_messages: dict[int, tuple[bytes, bytes]] = {}
        self._count = 0
        self._damaged = 0

    def add(self, records: Sequence[TraceEvent]) -> None:
        """Add the records of one chunk."""
        spans = records
        # Most chunks have only complete spans (ph "X"), so the list is filtered only if needed.
        if [record.ph for record in records].count("X") < len(records):
            spans = [record for record in records if record.ph == "X"]
            self._add_metadata(records)
        labels = [record.cat for record in spans]
        if "Trace" in labels:  # the profiler's own span around the whole trace
            spans = [record for record in spans if record.cat != "Trace"]
        spans = self._with_valid_times(spans)
        labels = [record.cat for record in spans]
        if not spans:
            return
        arguments = [record.args for record in spans]
        # Joining and splitting once decodes the raw JSON at half the cost; it has no zero byte.
        shapes = b"\0".join([args.dims for args in arguments]).split(b"\0")
        count = len(spans)
        part = {
            "start_ns": _nanoseconds([record.ts for record in spans]),
            "duration_ns": _nanoseconds([record.dur for record in spans]),
            "name": _encode(self._names, [record.name for record in spans], count),
            "label": _encode(self._labels, labels, count),
            "thread": self._number_threads(spans),
            "external": np.fromiter([args.external for args in arguments], np.int64, count),
            "correlation": np.fromiter([args.correlation for args in arguments], np.int64, count),
            "shape": _encode(self._shapes, shapes, count),
            "moved_bytes": np.fromiter([args.bytes_moved for args in arguments], np.int64, count),
        }
        for name, column in part.items():
            self._parts[name].append(column)
        # Before `_count` advances: it is the row of this chunk's first span.
        self._add_messages(spans, part["label"])
        self._count += count

    def _with_valid_times(self, records: Sequence[TraceEvent]) -> Sequence[TraceEvent]:
        """Return the records whose times are valid numbers, given as numbers or as text."""
        if not any(type(record.ts) is str or type(record.dur) is str for record in records):
            return records
        valid = [
            record for record in records if _is_time(record.ts) and _is_time(record.dur, minimum=0)
        ]
        self._damaged += len(records) - len(valid)
        return valid

    def _number_threads(self, spans: Sequence[TraceEvent]) -> Array:
        processes = [record.pid for record in spans]
        threads = [record.tid for record in spans]
        first = processes[0], threads[0]
        # Most chunks come from a single thread.
        if processes.count(first[0]) == threads.count(first[1]) == len(spans):
            return np.full(len(spans), self._threads[first], np.int32)
        return _encode(self._threads, zip(processes, threads, strict=True), len(spans))

    def _add_messages(self, spans: Sequence[TraceEvent], labels: Array) -> None:
        """Store the messages of the few spans that are collectives."""
        # A label that no span has gets a new id here and then matches nothing.
        kernel, scope = self._labels["kernel"], self._labels["user_annotation"]
        operator = self._labels["cpu_op"]
        for index in np.flatnonzero((labels == kernel) | (labels == scope)).tolist():
            record = spans[index]
            # Kineto describes NCCL's messages in the kernel's arguments.
            if record.args.collective:
                self._decoded_messages[self._count + index] = message_of(record.args)
            # gloo's scopes (`gloo:all_reduce`) only have the inputs, which `finish` decodes. The
            # copies release the text of the chunk.
            elif ":" in record.name and labels[index] == scope:
                self._raw_messages[self._count + index] = (
                    bytes(record.args.dims), bytes(record.args.types),
                )  # fmt: skip
        # The operator around a collective, with the same arguments as NCCL's kernel.
        params_name = self._names["record_param_comms"]
        names = self._parts["name"][-1]
        for index in np.flatnonzero((labels == operator) & (names == params_name)).tolist():
            if spans[index].args.collective:
                self._decoded_messages[self._count + index] = message_of(spans[index].args)

    def _add_metadata(self, records: Sequence[TraceEvent]) -> None:
        """Add thread names, process names and allocations."""
        allocations = []
        for record in records:
            phase = record.ph
            if phase == "i" and record.name == "[memory]":
                allocations.append(record)
            elif phase == "M" and record.name == "process_name":
                self._process_names[record.pid] = record.args.name
            elif phase == "M" and record.name == "thread_name":
                self._thread_names[record.pid, record.tid] = record.args.name
        allocations = list(self._with_valid_times(allocations))
        if not allocations:
            return
        arguments = [record.args for record in allocations]
        device = [a.device_id if a.device_type > 0 else -1 for a in arguments]  # 0 is the CPU
        columns = {
            "at_ns": _nanoseconds([record.ts for record in allocations]),
            "change_bytes": np.array([a.size_bytes for a in arguments], np.int64),
            "allocated_bytes": np.array([a.allocated_bytes for a in arguments], np.int64),
            "reserved_bytes": np.array([a.reserved_bytes for a in arguments], np.int64),
            "address": np.array([a.address for a in arguments], np.int64),
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
        """Sort the collected records by thread, start, and longest first.

        Args:
            header: members of the trace's JSON object other than the events.
            warnings: warnings from reading the file.
            file_bytes: size of the file.
            damaged: number of events that the reader skipped.
            name: file name, for the warning about damaged events.
        """
        columns = {name: _concatenate(self._parts.pop(name), COLUMNS[name]) for name in COLUMNS}
        valid_rows = self._drop_outliers(columns)
        threads = tuple(
            Thread(
                process=process, thread=thread,
                process_name=self._process_names.get(process, ""),
                name=self._thread_names.get((process, thread), ""),
            )
            for process, thread in self._threads
        )  # fmt: skip
        names, base_ns = tuple(self._names), _bounded_int(header.get("baseTimeNanoseconds", 0)) or 0
        # Kineto's times are relative to `baseTimeNanoseconds`, which is wall-clock time.
        columns["start_ns"] += base_ns
        keys = (columns[key][valid_rows] for key in ("thread", "start_ns", "duration_ns"))
        order = valid_rows[in_order(*keys)]
        category = categorize(columns.pop("label"), columns["name"], columns["thread"],
                              tuple(self._labels), names, threads)  # fmt: skip
        # Free each column as soon as it has been sorted, to limit peak memory.
        spans: dict[str, Any] = {key: columns.pop(key)[order] for key in tuple(columns)}
        # `category` is still in file order here, as the rows of the messages are.
        messages = self._finish_messages(order, category)
        category = category[order]
        return Trace(
            **spans,
            category=category,
            names=names,
            shapes=tuple(shape.decode(errors="replace") for shape in self._shapes),
            threads=threads,
            memory=self._finish_memory(base_ns),
            messages=name_groups(
                header, names, spans["name"], spans["start_ns"], category, messages
            ),
            warnings=(*warnings, *_damage_warning(name, damaged + self._damaged)),
            file_bytes=file_bytes,
            **_describe(header),
        )

    def _drop_outliers(self, columns: dict[str, Array]) -> Array:
        """Return the rows whose times are plausible, and count the others as damaged."""
        start, duration = columns["start_ns"], columns["duration_ns"]
        if not len(start):
            return np.zeros(0, np.int64)
        # A few damaged starts cannot shift the median, unlike the minimum or the mean.
        median = int(np.median(start))
        plausible = (np.abs(start - median) <= MAX_SPAN_NS) & (duration <= MAX_SPAN_NS)
        self._damaged += int(len(plausible) - plausible.sum())
        return np.flatnonzero(plausible)

    def _finish_memory(self, base_ns: int) -> Memory:
        columns = {
            name: _concatenate(self._memory[name], MEMORY_COLUMNS[name]) for name in self._memory
        }
        columns["at_ns"] += base_ns
        order = np.argsort(columns["at_ns"], kind="stable")
        return Memory(**{name: column[order] for name, column in columns.items()})

    def _finish_messages(self, order: Array, category: Array) -> dict[int, CollectiveMessage]:
        # (file rows,) position of each row after sorting; -1 if it was dropped as an outlier.
        position = np.full(len(category), -1)
        position[order] = np.arange(len(order))
        messages = {
            int(position[row]): message
            for row, message in self._decoded_messages.items()
            if position[row] >= 0
        }
        for row, (dims, types) in self._raw_messages.items():
            # Other scopes may have a colon in their name as well.
            if category[row] == Category.COLLECTIVE and position[row] >= 0:
                elements, dtype = first_message(dims, types)
                messages[int(position[row])] = CollectiveMessage(
                    kind="", sent_elements=elements, received_elements=elements, dtype=dtype,
                    group="", group_size=0, ranks=(),
                )  # fmt: skip
        return messages


def _concatenate(chunks: list[Array], dtype: type[np.integer[Any]]) -> Array:
    return np.concatenate(chunks) if chunks else np.zeros(0, dtype)


def _encode(ids: _Ids, keys: Iterable[Any], count: int) -> Array:
    return np.fromiter(map(ids.__getitem__, keys), np.int32, count)


def _is_time(value: float | str, *, minimum: int = -MAX_NS) -> bool:
    """Return whether a text is microseconds in bounds; numbers were checked when decoded."""
    if not isinstance(value, str):
        return True
    return MICROSECONDS.fullmatch(value) is not None and minimum <= _to_ns(value) <= MAX_NS


def _nanoseconds(values: list[float | str]) -> Array:
    """Convert microseconds, as numbers or as the Ascend profiler's decimal text, to int64 ns."""
    if any(type(value) is str for value in values):
        return np.array([_to_ns(value) for value in values], np.int64)
    times = np.fromiter(values, np.float64, len(values))
    whole_us = np.floor(times)
    # Scale the fraction separately: microseconds since 1970 times 1000 would lose digits.
    return whole_us.astype(np.int64) * 1000 + np.rint((times - whole_us) * 1000).astype(np.int64)


def _to_ns(value: float | str) -> int:
    if not isinstance(value, str):
        return round(value * 1000)
    whole_us, _, fraction = value.strip().partition(".")
    # In decimal, as a float of microseconds since 1970 resolves only 250 ns.
    fraction_ns = int((fraction + "000")[:3])
    # The sign applies to the fraction too, also in "-0.5", whose integer part is 0.
    return int(whole_us or 0) * 1000 + (-fraction_ns if whole_us.startswith("-") else fraction_ns)


def in_order(thread: Array, start: Array, duration: Array) -> Array:
    """Return the row order by thread, then start, then longest first.

    Profilers write almost in time order, which a stable sort handles in one pass. Durations are
    unordered, so they are sorted only among spans with equal starts.
    """
    order = np.argsort(start, kind="stable")
    order = order[np.argsort(thread[order], kind="stable")]
    equal = (np.diff(start[order]) == 0) & (np.diff(thread[order]) == 0)
    # Both neighbors of an equal pair belong to the tie.
    tied = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
    rows = order[tied]
    # `lexsort` sorts by its last key first, so every tie stays within its own positions.
    order[tied] = rows[np.lexsort((-duration[rows], start[rows], thread[rows]))]
    return order


def _bounded_int(value: object, *, minimum: int = -MAX_NS, maximum: int = MAX_NS) -> int | None:
    return value if isinstance(value, int) and minimum <= value <= maximum else None


def _describe(header: dict[str, Any]) -> dict[str, Any]:
    """Return the rank, world size and host from a trace's header, if present."""
    distributed, other_data, host = (
        header.get(k) for k in ("distributedInfo", "otherData", "host_name")
    )
    distributed = distributed if isinstance(distributed, dict) else {}
    return {
        "rank": _bounded_int(distributed.get("rank"), minimum=0, maximum=MAX_RANKS),
        "world_size": _bounded_int(distributed.get("world_size"), minimum=1, maximum=MAX_RANKS),
        "host": host if isinstance(host, str) else "",
        "is_export": isinstance(other_data, dict) and other_data.get("producer") == EXPORT,
    }


def _damage_warning(name: str, damaged: int) -> tuple[str, ...]:
    if not damaged:
        return ()
    events = "1 damaged event was" if damaged == 1 else f"{damaged} damaged events were"
    return (
        f"{name}: {events} skipped (invalid JSON, or a time or number out of range); the time "
        "they covered counts as idle",
    )
