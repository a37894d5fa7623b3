"""Trace events of the Ascend profiler's databases.

torch_npu writes `ascend_pytorch_profiler_RANK.db` by default, and msprof writes `msprof_*.db`; both
have the tables read here. Names and processes are converted to match `trace_view.json`.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from msgspec import Raw

from ms_profile.trace.database import Database, nanoseconds
from ms_profile.trace.records import Arguments, TraceEvent

RANK: Final = re.compile(r"ascend_pytorch_profiler_(\d{1,7})\.db")
PYTHON, CANN, HARDWARE, COMMUNICATION = 1, 2, 3, 4
PROCESSES: Final = {PYTHON: "Python", CANN: "CANN", HARDWARE: "Ascend Hardware",
                    COMMUNICATION: "Communication"}  # fmt: skip
LEVELS: Final = {"acl": "AscendCL", "model": "Model", "node": "Node", "runtime": "Runtime",
                 "communication": "Communication", "hccl": "Communication"}  # fmt: skip
"""Prefix of a CANN call's name, by its type in ENUM_API_TYPE."""
LABELS: Final = {"op": "cpu_op", "trace": "python_function", "mstx": "user_annotation"}
MAX_BYTES: Final = 1 << 50


def records(database: Database, header: dict[str, Any]) -> Iterator[TraceEvent]:
    """Yield host operators, CANN calls, device tasks, collectives and memory events."""
    texts = database.texts("STRING_IDS")
    header["distributedInfo"] = {"rank": _rank(database)}
    database.base_ns = _first_ns(database)
    header["baseTimeNanoseconds"] = database.base_ns
    hosts = [row[0] for row in database.rows("HOST_INFO", "hostName")]
    header["host_name"] = hosts[0] if hosts else ""
    for pid, name in PROCESSES.items():
        yield TraceEvent(ph="M", name="process_name", pid=pid, args=Arguments(name=name))
    kinds = {key: name for key, name in database.rows("ENUM_API_TYPE", "id", "name")
             if isinstance(key, int) and isinstance(name, str)}  # fmt: skip
    yield from _host(database, texts, kinds)
    yield from _tasks(database, texts)
    yield from _collectives(database, texts)
    yield from _memory(database)


def _rank(database: Database) -> int | None:
    match = RANK.fullmatch(database.path.name)
    if match:
        return int(match[1])
    ranks = [row[0] for row in database.rows("RANK_DEVICE_MAP", "rankId")]
    # -1 for a process without a rank.
    return ranks[0] if len(ranks) == 1 and isinstance(ranks[0], int) and ranks[0] >= 0 else None


def _first_ns(database: Database) -> int:
    """Return the start of the first row, which is close to all other times."""
    for table in ("PYTORCH_API", "CANN_API", "TASK"):
        for (start,) in database.rows(table, "startNs"):
            if (first := nanoseconds(start)) is not None:
                return first
    return 0


def _host(database: Database, texts: dict[int, str], kinds: dict[int, str]) -> Iterator[TraceEvent]:
    for start, end, thread, name, code, shapes, dtypes in database.rows(
        "PYTORCH_API", "startNs", "endNs", "globalTid", "name", "type", "inputShapes",
        "inputDtypes",
    ):  # fmt: skip
        if span := database.span(start, end):
            yield TraceEvent(
                ph="X", name=texts.get(name, "unknown operator"),
                # Older versions record only operators, and no type.
                cat=LABELS.get(kinds.get(code, "op"), "") or "queue", pid=PYTHON, tid=_tid(thread),
                ts=span[0], dur=span[1],
                args=Arguments(dims=_json(texts.get(shapes)), types=_json(texts.get(dtypes))),
            )  # fmt: skip
    for start, end, thread, name, code in database.rows(
        "CANN_API", "startNs", "endNs", "globalTid", "name", "type"
    ):
        if span := database.span(start, end):
            level = LEVELS.get(kinds.get(code, ""), "")
            call = texts.get(name, "unknown call")
            yield TraceEvent(ph="X", name=f"{level}@{call}" if level else call, pid=CANN,
                             tid=_tid(thread), ts=span[0], dur=span[1])  # fmt: skip
    for start, end, thread, name in database.rows(
        "MSTX_EVENTS", "startNs", "endNs", "globalTid", "message"
    ):
        span = database.span(start, end) if start != end else None  # equal: a mark
        if span is not None:
            yield TraceEvent(ph="X", name=texts.get(name, "mstx"), cat="user_annotation",
                             pid=PYTHON, tid=_tid(thread), ts=span[0], dur=span[1])  # fmt: skip
    for start, end, thread in database.rows("GC_RECORD", "startNs", "endNs", "globalTid"):
        if span := database.span(start, end):
            yield TraceEvent(ph="X", name="GC", cat="GC", pid=PYTHON,
                             tid=_tid(thread), ts=span[0], dur=span[1])  # fmt: skip


def _tid(global_id: object) -> int:
    """Return the thread id, the lower 32 bits of a `globalTid`."""
    return global_id & 0xFFFFFFFF if isinstance(global_id, int) else 0


def _json(text: str | None) -> Raw:
    """Convert shapes such as `4,8;8,8` to JSON, as in `trace_view.json`."""
    return Raw(msgspec.json.encode(text)) if text else Raw(b"")


def _tasks(database: Database, texts: dict[int, str]) -> Iterator[TraceEvent]:
    """Yield device tasks, without the parts of collectives, which would be counted twice."""
    names = {task: texts.get(name) for name, task in
             database.rows("COMPUTE_TASK_INFO", "name", "globalTaskId")}  # fmt: skip
    parts = {row[0] for row in database.rows("COMMUNICATION_TASK_INFO", "globalTaskId")}
    sizes: dict[Any, Any] = dict(database.rows("MEMCPY_INFO", "globalTaskId", "size"))
    for start, end, stream, task, code in database.rows(
        "TASK", "startNs", "endNs", "streamId", "globalTaskId", "taskType"
    ):
        if task in parts:
            continue
        if span := database.span(start, end):
            size = sizes.get(task, 0)
            yield TraceEvent(
                ph="X", name=names.get(task) or texts.get(code, "unknown task"), pid=HARDWARE,
                tid=stream if isinstance(stream, int) else 0, ts=span[0], dur=span[1],
                args=Arguments(bytes_moved=size if isinstance(size, int) else 0),
            )  # fmt: skip


def _collectives(database: Database, texts: dict[int, str]) -> Iterator[TraceEvent]:
    threads: dict[int, int] = {}
    for start, end, name, group in database.rows(
        "COMMUNICATION_OP", "startNs", "endNs", "opName", "groupName"
    ):
        group_name = texts.get(group, "")
        if group not in threads:
            threads[group] = len(threads) + 1
            yield TraceEvent(ph="M", name="thread_name", pid=COMMUNICATION, tid=threads[group],
                             args=Arguments(name=f"Group {group_name} Communication"))  # fmt: skip
        if span := database.span(start, end):
            yield TraceEvent(ph="X", name=texts.get(name, "unknown collective"),
                             pid=COMMUNICATION, tid=threads[group], ts=span[0],
                             dur=span[1])  # fmt: skip


def _memory(database: Database) -> Iterator[TraceEvent]:
    """Yield allocations and releases with the allocator's totals after each."""
    for device, size, address, *moments in database.rows(
        "OP_MEMORY", "deviceId", "size", "addr",
        "allocationTime", "allocationTotalAllocated", "allocationTotalReserved",
        "releaseTime", "releaseTotalAllocated", "releaseTotalReserved",
    ):  # fmt: skip
        for sign, (time, allocated, reserved) in ((1, moments[:3]), (-1, moments[3:])):
            numbers = (size, allocated, reserved)
            at = nanoseconds(time)
            # A block that is never released has no release time, or 0.
            if not at or not all(isinstance(n, int) and 0 <= n < MAX_BYTES for n in numbers):
                continue
            yield TraceEvent(
                ph="i", name="[memory]", ts=(at - database.base_ns) / 1000,
                args=Arguments(
                    size_bytes=sign * size, allocated_bytes=allocated, reserved_bytes=reserved,
                    address=address if isinstance(address, int) else -1, device_type=1,
                    device_id=device if isinstance(device, int) and device >= 0 else 0,
                ),
            )  # fmt: skip
