"""Allocations of a device with their call stacks, from a memory snapshot or a trace's events.

A snapshot (`torch.cuda.memory._dump_snapshot`) has the segments at its end and the last events of
the allocator. Blocks allocated before the first event have `begin` -1.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from ms_profile.analysis.memory import innermost_spans
from ms_profile.errors import TraceError
from ms_profile.files.plain_pickle import read_plain_pickle
from ms_profile.trace.columns import Trace
from ms_profile.trace.nesting import parents
from ms_profile.vendors.category import Category

Frame = tuple[str, str, int]
"""Function, file and line of a call; file "" for an operator of a trace."""
Stack = tuple[Frame, ...]
"""Frames, innermost first."""
MAX_BYTES: Final = 1 << 53
MAX_FRAMES: Final = 256
PYTHON: Final = re.compile(r"(.+)\((\d{1,9})\): (.+)")
"""A span of a Python function: `model.py(12): forward`."""


@frozen(kw_only=True)
class OutOfMemory:
    """An allocation that failed."""

    event: int
    size_bytes: int
    device_free_bytes: int
    """Free memory of the device as reported by its driver."""
    stack: Stack


@frozen(kw_only=True)
class Segments:
    """Segments that the allocator held when the snapshot was written; sizes in bytes."""

    count: int = 0
    reserved: int = 0
    allocated: int = 0
    free: int = 0
    """Free blocks in all segments."""
    releasable: int = 0
    """Segments without a block in use, which `empty_cache` returns to the driver."""
    largest_free: int = 0
    """Largest free block."""
    rounding: int = 0
    """Sum over the blocks in use of their size minus the requested size."""
    pools: Mapping[str, int] = field(factory=dict)
    """Reserved bytes by pool: small, large, and private pools, such as a CUDA graph's."""


@frozen(kw_only=True, eq=False)
class Allocations:
    """Allocations of one device, (A,) each, among E events of its allocator."""

    device: int
    """Device index; -1 for the host."""
    size: NDArray[np.int64]
    begin: NDArray[np.int64]
    """Event that allocated the block; -1 for blocks allocated before the first event."""
    end: NDArray[np.int64]
    """Event that freed the block; E for blocks that were in use at the end."""
    stack: NDArray[np.int64]
    """Index into `stacks`."""
    stacks: tuple[Stack, ...]
    at_s: NDArray[np.float64]
    """(E,) time of each event after the first one, in seconds."""
    reserved: NDArray[np.int64]
    """(E,) reserved bytes after each event."""
    segments: Segments | None
    """None for a trace, which has none."""
    out_of_memory: tuple[OutOfMemory, ...] = ()
    damaged: int = 0
    """Number of malformed entries that were skipped."""


class _Rows:
    """Allocations found while the events are read in order."""

    def __init__(self) -> None:
        self.size: list[int] = []
        self.begin: list[int] = []
        self.end: list[int] = []
        self.stack: list[int] = []
        self.live: dict[int, int] = {}
        """Row of the allocation at each address."""

    def allocate(self, event: int, address: int, size: int, stack: int) -> None:
        # The free of an earlier block at this address was not recorded.
        self.free(event, address, 0)
        self.live[address] = len(self.size)
        self.add(event, -1, size, stack)

    def free(self, event: int, address: int, size: int) -> None:
        row = self.live.pop(address, None)
        if row is not None:
            self.end[row] = event
        elif size:
            self.add(-1, event, size, 0)

    def add(self, begin: int, end: int, size: int, stack: int) -> None:
        self.size.append(size)
        self.begin.append(begin)
        self.end.append(end)
        self.stack.append(stack)

    def columns(self, events: int) -> dict[str, Any]:
        end = np.array(self.end, np.int64)
        columns = {name: np.array(getattr(self, name), np.int64)
                   for name in ("size", "begin", "stack")}  # fmt: skip
        return columns | {"end": np.where(end < 0, events, end)}


class _Stacks:
    """Table of distinct stacks; entry 0 is the unknown stack."""

    def __init__(self) -> None:
        self.ids: dict[Stack, int] = {(): 0}
        self._by_list: dict[int, int] = {}

    def number(self, frames: object) -> int:
        """Return the id of a snapshot's list of frames, which many entries share."""
        number = self._by_list.get(id(frames))
        if number is None:
            stack = tuple(_frames(frames)) if isinstance(frames, list) else ()
            number = self.ids.setdefault(stack, len(self.ids))
            self._by_list[id(frames)] = number
        return number


def _frames(frames: list[Any]) -> list[Frame]:
    parsed = []
    for item in frames[:MAX_FRAMES]:
        if isinstance(item, dict):
            name, file, line = item.get("name"), item.get("filename"), item.get("line")
            if isinstance(name, str) and isinstance(file, str):
                parsed.append((name[:500], file[-500:], _count(line) or 0))
    return parsed


def _count(value: object) -> int | None:
    """Return a size or an index; None for anything else."""
    return value if type(value) is int and 0 <= value <= MAX_BYTES else None


def read_snapshot(path: Path) -> list[Allocations]:
    """Read a snapshot of `torch.cuda.memory._dump_snapshot`; one item per device in use.

    Raises:
        TraceError: the file is not a snapshot, is damaged, or contains more than plain data.
    """
    snapshot = read_plain_pickle(path, error=TraceError)
    traces, segments = (
        snapshot.get(name) if isinstance(snapshot, dict) else None
        for name in ("device_traces", "segments")
    )
    if not isinstance(traces, list) or not isinstance(segments, list):
        raise TraceError(
            f"{path} must be a memory snapshot with segments and device_traces; write one with "
            "torch.cuda.memory._dump_snapshot"
        )
    by_device: defaultdict[int, list[Any]] = defaultdict(list)
    for segment in segments:
        if isinstance(segment, dict):
            by_device[_count(segment.get("device")) or 0].append(segment)
    # A hostile pickle may repeat one list many times, which would take quadratic time.
    lists = [trace for trace in traces if isinstance(trace, list) and trace]
    blocks = [segment.get("blocks") for items in by_device.values() for segment in items]
    if len({id(item) for item in (*lists, *blocks)}) < len(lists) + len(blocks):
        raise TraceError(
            f"{path} is damaged: several devices or segments share one list; write it again"
        )
    devices = sorted({number for number, trace in enumerate(traces) if trace} | by_device.keys())
    if not devices:
        raise TraceError(
            f"{path} has no allocations; call torch.cuda.memory._record_memory_history() before "
            "the steps to record"
        )
    return [
        _device(number, traces[number] if number < len(traces) else [], by_device[number])
        for number in devices
    ]


def _device(device: int, trace: Any, segments: list[dict[str, Any]]) -> Allocations:
    rows, stacks = _Rows(), _Stacks()
    entries = trace if isinstance(trace, list) else []
    at_us = np.zeros(len(entries))
    reserved_change = np.zeros(len(entries), np.int64)
    failures, damaged = [], 0
    for event, entry in enumerate(entries):
        if not isinstance(entry, dict):
            damaged += 1
            continue
        at_us[event] = _count(entry.get("time_us")) or 0
        action, size = entry.get("action"), _count(entry.get("size"))
        address = entry.get("addr")
        if action in ("snapshot", "free_requested"):  # requested: other streams still use it
            continue
        if not isinstance(address, int) and action == "oom":
            address = 0
        if size is None or not isinstance(address, int):
            damaged += 1
        elif action == "alloc":
            rows.allocate(event, address, size, stacks.number(entry.get("frames")))
        elif action == "free_completed":
            rows.free(event, address, size)
        elif action in ("segment_alloc", "segment_map"):
            reserved_change[event] = size
        elif action in ("segment_free", "segment_unmap"):
            reserved_change[event] = -size
        elif action == "oom":
            failures.append(
                OutOfMemory(
                    event=event, size_bytes=size,
                    device_free_bytes=_count(entry.get("device_free")) or 0,
                    stack=tuple(_frames(entry.get("frames") or [])),
                )
            )  # fmt: skip
    final = _final_state(segments, rows, stacks)
    # The reserved size is known at the end, so it is computed backwards from there.
    freed_later = reserved_change[::-1].cumsum()[::-1] - reserved_change
    times = np.maximum.accumulate(at_us) if len(at_us) else at_us
    return Allocations(
        device=device,
        **rows.columns(len(entries)),
        stacks=tuple(stacks.ids),
        at_s=(times - times[0]) / 1e6 if len(times) else times,
        reserved=final.reserved - freed_later,
        segments=final,
        out_of_memory=tuple(failures),
        damaged=damaged,
    )


def _final_state(segments: list[dict[str, Any]], rows: _Rows, stacks: _Stacks) -> Segments:
    """Add the blocks that were in use before the first event, and sum up the segments."""
    totals = dict.fromkeys(("reserved", "allocated", "free", "releasable", "rounding"), 0)
    largest, pools = 0, defaultdict[str, int](int)
    for segment in segments:
        size = _count(segment.get("total_size")) or 0
        free, in_use, address = 0, 0, segment.get("address")
        blocks = segment.get("blocks")
        for block in blocks if isinstance(blocks, list) else ():
            block_size = _count(block.get("size")) if isinstance(block, dict) else None
            if block_size is None:
                continue
            # Older snapshots have no addresses of blocks: they follow each other in the segment.
            block_address = block.get("address", address)
            if isinstance(block_address, int):
                address = block_address + block_size
            if block.get("state") == "inactive":
                free += block_size
                largest = max(largest, block_size)
                continue
            in_use += block_size
            totals["rounding"] += max(block_size - (_count(block.get("requested_size"))
                                                    or block_size), 0)  # fmt: skip
            if block_address not in rows.live:
                rows.add(-1, -1, block_size, stacks.number(block.get("frames")))
        pool = segment.get("segment_pool_id")
        private = isinstance(pool, tuple) and any(pool)
        name = "private" if private else "small" if segment.get("segment_type") == "small" else (
            "large")  # fmt: skip
        pools[name] += size
        totals["reserved"] += size
        totals["allocated"] += in_use
        totals["free"] += free
        totals["releasable"] += 0 if in_use else size
    return Segments(count=len(segments), largest_free=largest, pools=dict(pools), **totals)


def allocations_of_trace(trace: Trace) -> list[Allocations]:
    """Convert the profiler's [memory] events; the enclosing spans are the stacks.

    Raises:
        TraceError: the trace has no memory events.
    """
    memory = trace.memory
    if not len(memory.at_ns):
        raise TraceError(
            "the trace has no [memory] events; record it with torch.profiler's "
            "profile_memory=True, or `ms-profile run --metrics memory`"
        )
    stack_of_event, stacks = _enclosing_spans(trace)
    return [
        _device_of_trace(trace, device, np.flatnonzero(memory.device == device), stack_of_event,
                         stacks)
        for device in np.unique(memory.device).tolist()
    ]  # fmt: skip


def _device_of_trace(
    trace: Trace, device: int, events: NDArray[np.int64], stack_of_event: NDArray[np.int64],
    stacks: tuple[Stack, ...],
) -> Allocations:  # fmt: skip
    memory, rows = trace.memory, _Rows()
    change, allocated = memory.change_bytes[events], memory.allocated_bytes[events]
    for event, (address, size, stack) in enumerate(
        zip(memory.address[events].tolist(), change.tolist(), stack_of_event[events].tolist(),
            strict=True)
    ):  # fmt: skip
        if size > 0:
            rows.allocate(event, address, size, stack)
        elif size < 0:
            rows.free(event, address, -size)
    # Memory that was allocated before the trace and is not freed in it.
    earlier = sum(size for size, begin in zip(rows.size, rows.begin, strict=True) if begin < 0)
    remainder = int(allocated[0] - change[0]) - earlier
    if remainder > 0:
        rows.add(-1, -1, remainder, 0)
    return Allocations(
        device=device,
        **rows.columns(len(events)),
        stacks=stacks,
        at_s=(memory.at_ns[events] - memory.at_ns[events[0]]) / 1e9,
        reserved=memory.reserved_bytes[events],
        segments=None,
    )


def _enclosing_spans(trace: Trace) -> tuple[NDArray[np.int64], tuple[Stack, ...]]:
    """Return the stack of each memory event, (M,), and the table of stacks."""
    memory = trace.memory
    spans = trace.rows(Category.OPERATOR, Category.ANNOTATION, Category.PYTHON, Category.COLLECTIVE)
    ids: dict[Stack, int] = {(): 0}
    numbers = np.zeros(len(memory.at_ns), np.int64)
    frames = [_span_frame(name) for name in trace.names]
    for thread in np.unique(memory.thread).tolist():
        rows = spans[trace.thread[spans] == thread]
        parent = parents(trace.thread[rows], trace.start_ns[rows], trace.duration_ns[rows])
        events = np.flatnonzero(memory.thread == thread)
        owner = innermost_spans(trace, rows, memory.at_ns[events])
        number_of = {-1: 0}
        for index in np.unique(owner[owner >= 0]).tolist():
            stack: list[Frame] = []
            at = index
            while at >= 0 and len(stack) < MAX_FRAMES:
                stack.append(frames[int(trace.name[rows[at]])])
                at = int(parent[at])
            number_of[index] = ids.setdefault(tuple(stack), len(ids))
        numbers[events] = [number_of[index] for index in owner.tolist()]
    return numbers, tuple(ids)


def _span_frame(name: str) -> Frame:
    match = PYTHON.fullmatch(name)
    return (match[3], match[1], int(match[2])) if match else (name, "", 0)
