"""Records into columns: a few list comprehensions a chunk, then numpy."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_profile.trace.categories import categorise
from ms_profile.trace.columns import Category, CollectiveNote, Memory, Thread, Trace
from ms_profile.trace.groups import name_groups
from ms_profile.trace.records import Arguments, Record

__all__ = ["TraceBuilder"]

Array = NDArray[Any]
COLUMNS: Final = ("start", "duration", "name", "label", "thread", "external", "correlation",
                  "shape", "moved")  # fmt: skip
MEMORY_COLUMNS: Final = ("at", "change", "allocated", "reserved", "device", "thread")
ELEMENT_BYTES: Final = {
    **dict.fromkeys(("double", "long", "long int", "float64", "int64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("half", "c10::half", "c10::bfloat16", "bfloat16", "float16", "short"), 2),
    **dict.fromkeys(("bool", "byte", "char", "unsigned char", "uint8", "int8"), 1),
}


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
        self._notes: dict[int, Arguments] = {}
        self._messages: dict[int, tuple[bytes, bytes]] = {}
        self._count = 0

    def add(self, records: Sequence[Record]) -> None:
        """Take up the records of one chunk."""
        spans = [record for record in records if record.ph == "X" and record.cat != "Trace"]
        if len(spans) < len(records):
            self._add_others(records)
        if not spans:
            return
        arguments = [record.args for record in spans]
        shapes = self._shapes
        part = {
            "start": _nanoseconds([record.ts for record in spans]),
            "duration": _nanoseconds([record.dur for record in spans]),
            "name": _column(map(self._names.__getitem__, [r.name for r in spans]), np.int32),
            "label": _column(map(self._labels.__getitem__, [r.cat for r in spans]), np.int16),
            "thread": _column(
                map(self._threads.__getitem__, [(r.pid, r.tid) for r in spans]), np.int32
            ),
            "external": np.array([a.external for a in arguments], np.int64),
            "correlation": np.array([a.correlation for a in arguments], np.int64),
            "shape": _column((shapes[bytes(a.dims)] for a in arguments), np.int32),
            "moved": np.array([a.bytes_moved for a in arguments], np.int64),
        }
        for name, column in part.items():
            self._parts[name].append(column)
        self._note_collectives(spans, part["label"])
        self._count += len(spans)

    def _note_collectives(self, spans: Sequence[Record], labels: Array) -> None:
        """Keep the messages of the few spans that are collectives."""
        kernel, scope = self._labels["kernel"], self._labels["user_annotation"]
        operator = self._labels["cpu_op"]
        for place in np.flatnonzero((labels == kernel) | (labels == scope)).tolist():
            record = spans[place]
            if record.args.collective:
                self._notes[self._count + place] = record.args
            elif ":" in record.name and labels[place] == scope:
                self._messages[self._count + place] = (
                    bytes(record.args.dims), bytes(record.args.types),
                )  # fmt: skip
        wanted = self._names["record_param_comms"]
        names = self._parts["name"][-1]
        for place in np.flatnonzero((labels == operator) & (names == wanted)).tolist():
            if spans[place].args.collective:
                self._notes[self._count + place] = spans[place].args

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
        if not allocations:
            return
        arguments = [record.args for record in allocations]
        device = [a.device_id if a.device_type > 0 else -1 for a in arguments]
        columns = {
            "at": _nanoseconds([record.ts for record in allocations]),
            "change": np.array([a.size_bytes for a in arguments], np.int64),
            "allocated": np.array([a.allocated_bytes for a in arguments], np.int64),
            "reserved": np.array([a.reserved_bytes for a in arguments], np.int64),
            "device": np.array(device, np.int32),
            "thread": np.array([self._threads[r.pid, r.tid] for r in allocations], np.int32),
        }
        for name, column in columns.items():
            self._memory[name].append(column)

    def finish(self, header: dict[str, Any], warnings: Sequence[str], file_bytes: int) -> Trace:
        """Sort what was collected by thread, start and longest first."""
        columns = {name: self._take(self._parts, name) for name in COLUMNS}
        threads = tuple(
            Thread(
                process=process, thread=thread,
                process_name=self._process_names.get(process, ""),
                name=self._thread_names.get((process, thread), ""),
            )
            for process, thread in self._threads
        )  # fmt: skip
        base_ns = header.get("baseTimeNanoseconds", 0)
        base_ns = base_ns if isinstance(base_ns, int) else 0
        start = columns.pop("start") + base_ns
        order = _order(columns["thread"], start, columns["duration"])
        names = tuple(self._names)
        place = header.get("distributedInfo")
        place = place if isinstance(place, dict) else {}
        category = categorise(
            columns["label"],
            columns["name"],
            columns["thread"],
            tuple(self._labels),
            names,
            threads,
        )
        notes = name_groups(
            header, names, columns["name"][order], start[order], category[order],
            self._finish_notes(order, category),
        )  # fmt: skip
        # Each column is let go of as soon as its sorted copy is there.
        del columns["label"]
        return Trace(
            start_ns=start[order],
            duration_ns=columns.pop("duration")[order],
            name=columns.pop("name")[order],
            category=category[order],
            thread=columns.pop("thread")[order],
            external=columns.pop("external")[order],
            correlation=columns.pop("correlation")[order],
            shape=columns.pop("shape")[order],
            moved_bytes=columns.pop("moved")[order],
            names=names,
            shapes=tuple(shape.decode(errors="replace") for shape in self._shapes),
            threads=threads,
            memory=self._finish_memory(base_ns),
            notes=notes,
            rank=_whole(place.get("rank")),
            world_size=_whole(place.get("world_size")),
            host=str(header.get("host_name", "")),
            warnings=tuple(warnings),
            file_bytes=file_bytes,
        )

    def _take(self, parts: dict[str, list[Array]], name: str) -> Array:
        chunks = parts.pop(name)
        dtype = np.int64 if name in ("start", "duration", "at") else np.int32
        return np.concatenate(chunks) if chunks else np.zeros(0, dtype)

    def _finish_memory(self, base_ns: int) -> Memory:
        columns = {name: self._take(self._memory, name) for name in MEMORY_COLUMNS}
        order = np.argsort(columns["at"], kind="stable")
        return Memory(
            at_ns=columns["at"][order] + base_ns,
            change_bytes=columns["change"][order].astype(np.int64),
            allocated_bytes=columns["allocated"][order].astype(np.int64),
            reserved_bytes=columns["reserved"][order].astype(np.int64),
            device=columns["device"][order],
            thread=columns["thread"][order],
        )

    def _finish_notes(self, order: Array, category: Array) -> dict[int, CollectiveNote]:
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        notes = {}
        for row, arguments in self._notes.items():
            notes[int(position[row])] = CollectiveNote(
                kind=arguments.collective, sent_elements=arguments.sent_elements,
                received_elements=arguments.received_elements, dtype=arguments.dtype,
                group=arguments.group, group_size=arguments.group_size,
                ranks=_numbers(bytes(arguments.group_ranks)),
            )  # fmt: skip
        for row, (dims, types) in self._messages.items():
            if category[row] == Category.COLLECTIVE:
                elements, dtype = _message(dims, types)
                notes[int(position[row])] = CollectiveNote(
                    kind="", sent_elements=elements, received_elements=elements, dtype=dtype,
                    group="", group_size=0, ranks=(),
                )  # fmt: skip
        return notes


def _column(values: Iterable[int], dtype: type[np.integer[Any]]) -> Array:
    return np.array(list(values), dtype)


def _nanoseconds(values: list[float | str]) -> Array:
    """Microseconds, as numbers or as the Ascend profiler's exact text, to whole nanoseconds."""
    if values and isinstance(values[0], str):
        return np.array([_exact(value) for value in values], np.int64)
    times = np.array(values, np.float64)
    whole = np.floor(times)
    # Apart, so that microseconds since 1970 keep what digits they have.
    return whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)


def _exact(value: float | str) -> int:
    if not isinstance(value, str):
        return round(value * 1000)
    whole, _, fraction = value.strip().partition(".")
    return int(whole or 0) * 1000 + int((fraction + "000")[:3])


def _order(thread: Array, start: Array, duration: Array) -> Array:
    """Rows by thread, then start, then longest first."""
    if not len(start):
        return np.zeros(0, np.int64)
    return np.lexsort((-duration, start, thread))


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _numbers(text: bytes) -> tuple[int, ...]:
    """The whole numbers in a list that Kineto may have written as text, or cut with an ellipsis."""
    if b"..." in text:
        return ()
    pieces = text.decode(errors="replace").strip('"[] ').split(",")
    return tuple(int(piece) for piece in pieces if piece.strip().lstrip("-").isdigit())


def _message(dims: bytes, types: bytes) -> tuple[int, str]:
    """Elements and dtype of gloo's first input; (0, "") where shapes were not recorded."""
    try:
        shapes = msgspec.json.decode(dims) if dims else []
        kinds = msgspec.json.decode(types) if types else []
    except msgspec.DecodeError:
        return 0, ""
    total = 0
    for shape in shapes:
        if isinstance(shape, list) and shape and all(isinstance(side, int) for side in shape):
            total += int(np.prod(shape))
    return total, str(kinds[0]) if kinds and total else ""


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element of a dtype as profilers name it; None where unknown."""
    return ELEMENT_BYTES.get(dtype.lower())
