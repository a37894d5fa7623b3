"""Trace events of Nsight Systems' SQLite export (`nsys export --type sqlite`).

Names and labels are converted to Kineto's. NVTX ranges are operators (torch's `emit_nvtx`) or
scopes; a kernel belongs to the innermost operator around the driver call that launched it.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Raw

from ms_profile.trace.database import Database, nanoseconds
from ms_profile.trace.records import Arguments, TraceEvent

VERSION: Final = re.compile(r"_v\d+$")
"""Version suffix of a driver call; Kineto omits it."""
OPERATOR: Final = re.compile(r"(?P<name>.*?)(?:, (?:seq|op_id|sizes) = (?P<rest>.*))?", re.DOTALL)
SIZES: Final = re.compile(r"sizes = (\[.*\])")
IS_OPERATOR: Final = re.compile(r"[a-z_]\w*::\w|\w+Backward\d*$|autograd::")
COPIES: Final = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA",
                 8: "DtoD", 9: "HtoH", 10: "PtoP"}  # fmt: skip
MEMORY: Final = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
WAITS: Final = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
PROCESS: Final = 1 << 24
"""`globalTid` and `globalPid` have the process id in the 24 bits above the thread id's 24 bits."""
ENDS: Final = 1
Call = tuple[int, int, int]
"""Start in ns, end in ns, and number of an operator."""


def records(database: Database, header: dict[str, Any]) -> Iterator[TraceEvent]:
    """Yield the events of the process with the most kernels."""
    texts = database.texts("StringIds")
    process = _process(database, header)
    starts = [row[0] for row in database.rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")]
    header["baseTimeNanoseconds"] = nanoseconds(starts[0]) or 0 if starts else 0
    yield from _names(database, texts, process)
    operators: defaultdict[int, list[Call]] = defaultdict(list)
    yield from _ranges(database, texts, process, operators)
    external_of: dict[int, int] = {}
    yield from _calls(database, texts, process, operators, external_of)
    yield from _device(database, texts, process, external_of)


def _process(database: Database, header: dict[str, Any]) -> int | None:
    """Return the process with the most kernels; log a warning if the export has several."""
    counts = Counter(
        _pid(row[0]) for row in database.rows("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid")
    )
    if not counts:
        return None
    (process, _), *others = counts.most_common()
    if others:
        header["warnings"] = [
            f"{database.path.name} has kernels of {len(counts)} processes; process {process} "
            "is shown: run nsys once per rank, as in `-o rank%q{RANK}`"
        ]
    return process


def _pid(global_id: object) -> int:
    return global_id // PROCESS % PROCESS if isinstance(global_id, int) else 0


def _tid(global_id: object) -> int:
    return global_id % PROCESS if isinstance(global_id, int) else 0


def _names(database: Database, texts: dict[int, str], process: int | None) -> Iterator[TraceEvent]:
    for name_id, thread in database.rows("ThreadNames", "nameId", "globalTid"):
        if process in (None, _pid(thread)) and name_id in texts:
            yield TraceEvent(ph="M", name="thread_name", pid=_pid(thread), tid=_tid(thread),
                             args=Arguments(name=texts[name_id]))  # fmt: skip
    for device, name in database.rows("TARGET_INFO_GPU", "id", "name"):
        if isinstance(device, int) and isinstance(name, str):
            yield TraceEvent(ph="M", name="process_name", pid=device, args=Arguments(name=name))


def _ranges(
    database: Database, texts: dict[int, str], process: int | None,
    operators: defaultdict[int, list[Call]],
) -> Iterator[TraceEvent]:  # fmt: skip
    """Yield NVTX ranges, and collect each thread's operators by start time."""
    number = 0
    for start, end, text, text_id, thread in database.rows(
        "NVTX_EVENTS", "start", "end", "text", "textId", "globalTid"
    ):
        name = text if isinstance(text, str) else texts.get(text_id)
        if end is None or not name or process not in (None, _pid(thread)):
            continue  # a mark, or a range of another process
        span = database.span(start, end)
        if span is None:
            continue
        match = OPERATOR.fullmatch(name)
        short = match["name"] if match else name
        is_operator = (match is not None and match["rest"] is not None) or (
            IS_OPERATOR.match(short) is not None
        )
        arguments = Arguments()
        if is_operator:
            number += 1
            sizes = SIZES.search(name)
            dims = Raw(sizes[1].encode()) if sizes else Raw(b"")
            arguments = Arguments(external=number, dims=dims)
            operators[_tid(thread)].append((int(start), int(end), number))
        yield TraceEvent(
            ph="X", name=short, cat="cpu_op" if is_operator else "user_annotation",
            pid=_pid(thread), tid=_tid(thread), ts=span[0], dur=span[1], args=arguments,
        )  # fmt: skip
    for calls in operators.values():
        calls.sort(key=lambda call: (call[0], -call[1]))


def _calls(
    database: Database, texts: dict[int, str], process: int | None,
    operators: dict[int, list[Call]], external_of: dict[int, int],
) -> Iterator[TraceEvent]:  # fmt: skip
    """Yield driver calls, and record the operator around each by its correlation id."""
    starts = {thread: [call[0] for call in calls] for thread, calls in operators.items()}
    for start, end, name_id, thread, correlation in database.rows(
        "CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "nameId", "globalTid", "correlationId"
    ):
        span = None
        if process in (None, _pid(thread)):
            span = database.span(start, end)
        if span is None:
            continue
        tid, external = _tid(thread), -1
        calls = operators.get(tid, [])
        index = bisect_right(starts.get(tid, []), int(start)) - 1
        # Operators are nested: the innermost is the last to start that has not ended.
        while index >= 0 and calls[index][ENDS] < int(start):
            index -= 1
        if index >= 0:
            external = calls[index][2]
        number = correlation if isinstance(correlation, int) else -1
        external_of[number] = external
        yield TraceEvent(
            ph="X", name=VERSION.sub("", texts.get(name_id, "unknown call")), cat="cuda_runtime",
            pid=_pid(thread), tid=tid, ts=span[0], dur=span[1],
            args=Arguments(correlation=number, external=external),
        )  # fmt: skip


def _device(
    database: Database, texts: dict[int, str], process: int | None, external_of: dict[int, int]
) -> Iterator[TraceEvent]:
    """Yield kernels, copies, fills and waits, with device and stream as process and thread."""
    columns = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")

    def event(row: tuple[Any, ...], name: str, label: str, size: object = 0) -> TraceEvent | None:
        start, end, device, stream, correlation, pid = row
        span = database.span(start, end) if process in (None, _pid(pid)) else None
        if span is None:
            return None
        number = correlation if isinstance(correlation, int) else -1
        return TraceEvent(
            ph="X", name=name, cat=label, pid=device if isinstance(device, int) else 0,
            tid=stream if isinstance(stream, int) else 0, ts=span[0], dur=span[1],
            args=Arguments(correlation=number, external=external_of.get(number, -1),
                           bytes_moved=size if isinstance(size, int) else 0),
        )  # fmt: skip

    record: TraceEvent | None
    for *row, name_id, short_id in database.rows(
        "CUPTI_ACTIVITY_KIND_KERNEL", *columns, "demangledName", "shortName"
    ):
        name = texts.get(name_id) or texts.get(short_id, "unknown kernel")
        if record := event(tuple(row), name, "kernel"):
            yield record
    for *row, size, code, source, target in database.rows(
        "CUPTI_ACTIVITY_KIND_MEMCPY", *columns, "bytes", "copyKind", "srcKind", "dstKind"
    ):
        name = f"Memcpy {COPIES.get(code, 'unknown')}"
        if source in MEMORY and target in MEMORY:
            name += f" ({MEMORY[source]} -> {MEMORY[target]})"
        if record := event(tuple(row), name, "gpu_memcpy", size):
            yield record
    for *row, size, code in database.rows(
        "CUPTI_ACTIVITY_KIND_MEMSET", *columns, "bytes", "memKind"
    ):
        name = f"Memset ({MEMORY.get(code, 'Unknown')})"
        if record := event(tuple(row), name, "gpu_memset", size):
            yield record
    for *row, code in database.rows("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", *columns, "syncType"):
        if record := event(tuple(row), WAITS.get(code, "Synchronization"), "cuda_sync"):
            yield record
