"""One simulated training on a device, written as JSON and as a profiler's SQLite database.

CUDA: Kineto's JSON and the export of Nsight Systems. Ascend: `trace_view.json` and
`ascend_pytorch_profiler_0.db` with the columns that torch_npu writes.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

__all__ = ["Span", "simulate", "write_ascend_db", "write_ascend_json", "write_kineto", "write_nsys"]

EPOCH_NS = 1_760_000_000_000_000_000
PID = 4242
MAIN, LOADER = 4242, 4250
COMPUTE, COMMUNICATION = 7, 20
US = 1000


@frozen(kw_only=True)
class Span:
    """One span; times in ns after the start of the profiler."""

    kind: Literal["scope", "operator", "call", "kernel", "copy", "collective", "wait"]
    name: str
    start: int
    length: int
    thread: int
    """Thread, or stream of the device."""
    link: int = -1
    """Correlation id of a driver call and the kernel it launched."""
    operator: int = -1
    """Number of the operator, or of the launching operator."""
    size: int = 0
    shapes: str = ""


def simulate(vendor: Literal["cuda", "npu"], *, rank: int = 0, steps: int = 5) -> list[Span]:
    """Steps with a wait for data, a forward with kernels, a collective, a copy and an optimizer."""
    cuda = vendor == "cuda"
    launch = "cudaLaunchKernel" if cuda else "Node@launch"
    kernel = ("ampere_gemm_f32", "void add<float>(int)") if cuda else ("MatMulV3", "Add")
    collective = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if cuda else "hcom_allReduce__721_0_1"
    spans: list[Span] = []
    at, number = 5_000 * US + 137 * rank, 0

    def add(kind: Any, name: str, start: int, length: int, thread: int, **fields: Any) -> None:
        spans.append(
            Span(kind=kind, name=name, start=start, length=length, thread=thread, **fields)
        )

    for step in range(steps):
        begin = at
        wait = (300 + 40 * step + (900 if rank == 1 else 0)) * US
        add("scope", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, wait, MAIN)
        at += wait + 50 * US
        for index in range(4):
            number += 1
            add("operator", "aten::linear", at, 90 * US, MAIN, operator=number,
                shapes="[[64, 32], [32, 32]]")  # fmt: skip
            number += 1
            add("operator", "aten::addmm", at + 10 * US, 70 * US, MAIN, operator=number,
                shapes="[[64, 32], [32, 32]]")  # fmt: skip
            add("call", launch, at + 20 * US, 8 * US + 333, MAIN, link=number, operator=number)
            add("kernel", kernel[index % 2], at + (60 + 25 * index) * US, 110 * US + 250, COMPUTE,
                link=number, operator=number)  # fmt: skip
            at += 120 * US
        number += 1
        add("call", launch, at, 9 * US, MAIN, link=number)
        add("collective", collective, at + 200 * US, 600 * US, COMMUNICATION, link=number)
        number += 1
        add("copy", "Memcpy HtoD (Pinned -> Device)" if cuda else "MEMCPY_ASYNC", at + 20 * US,
            44 * US, COMPUTE, link=number, size=1 << 20)  # fmt: skip
        sync = "cudaStreamSynchronize" if cuda else "AscendCL@aclrtSynchronizeStream"
        add("call", sync, at + 50 * US, 760 * US, MAIN)
        at += 850 * US
        add("scope", "Optimizer.step#AdamW.step", at, 200 * US, MAIN)
        number += 1
        add("operator", "aten::_foreach_add_", at + 10 * US, 150 * US, MAIN, operator=number)
        add("call", launch, at + 30 * US, 7 * US, MAIN, link=number, operator=number)
        add("kernel", "multi_tensor" if cuda else "ForeachAdd", at + 90 * US, 300 * US, COMPUTE,
            link=number, operator=number)  # fmt: skip
        at += 420 * US
        add("scope", f"ProfilerStep#{step}", begin, at - begin, MAIN)
    return spans


def write_kineto(path: Path, spans: list[Span], *, rank: int = 0) -> Path:
    """Write Kineto's JSON."""
    labels = {"scope": "user_annotation", "operator": "cpu_op", "call": "cuda_runtime",
              "kernel": "kernel", "copy": "gpu_memcpy", "collective": "kernel"}  # fmt: skip
    events: list[dict[str, Any]] = []
    for span in spans:
        on_device = span.kind in ("kernel", "copy", "collective")
        arguments: dict[str, Any] = {}
        if span.kind != "scope" and span.operator >= 0:
            arguments["External id"] = span.operator
        if span.kind not in ("scope", "operator") and span.link >= 0:
            arguments["correlation"] = span.link
        if span.shapes:
            arguments["Input Dims"] = json.loads(span.shapes)
        if span.size:
            arguments["bytes"] = span.size
        events.append(
            {"ph": "X", "cat": labels[span.kind], "name": span.name, "pid": 0 if on_device else PID,
             "tid": span.thread, "ts": span.start / 1000, "dur": span.length / 1000,
             "args": arguments}
        )  # fmt: skip
    document = {"schemaVersion": 1, "baseTimeNanoseconds": EPOCH_NS, "traceEvents": events,
                "distributedInfo": {"rank": rank, "world_size": 2}}  # fmt: skip
    path.write_text(json.dumps(document))
    return path


class _Texts:
    """String table by id."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.ids.setdefault(text, len(self.ids) + 1)


def _create(path: Path, tables: dict[str, tuple[str, list[tuple[Any, ...]]]]) -> Path:
    """Write tables of columns "name TYPE, ..." and rows."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for table, (columns, rows) in tables.items():
            connection.execute(f"CREATE TABLE {table} ({columns})")
            marks = ", ".join("?" * (columns.count(",") + 1))
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    return path


def write_nsys(path: Path, spans: list[Span]) -> Path:
    """Write the export of Nsight Systems."""
    texts = _Texts()
    global_pid = PID << 24

    def device_row(span: Span) -> tuple[Any, ...]:
        return span.start, span.start + span.length, 0, 1, span.thread, span.link, global_pid

    def nvtx(span: Span) -> tuple[Any, ...]:
        text = span.name
        if span.kind == "operator":
            sizes = f", sizes = {span.shapes}" if span.shapes else ""
            text = f"{span.name}, op_id = {span.operator}{sizes}"
        return (span.start, span.start + span.length, 59, text, None, global_pid | span.thread)

    def of(*kinds: str) -> Iterator[Span]:
        return (span for span in spans if span.kind in kinds)

    device = ("start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, "
              "globalPid INT")  # fmt: skip
    runtime = [
        (s.start, s.start + s.length, 0, global_pid | s.thread, s.link, texts(f"{s.name}_v7000"), 0)
        for s in of("call")
    ]
    kernels = [(*device_row(s), texts(s.name), texts(s.name.split("(")[0]))
               for s in of("kernel", "collective")]  # fmt: skip
    return _create(path, {
        "CUPTI_ACTIVITY_KIND_KERNEL": (f"{device}, demangledName INT, shortName INT", kernels),
        "CUPTI_ACTIVITY_KIND_MEMCPY": (
            f"{device}, bytes INT, copyKind INT, srcKind INT, dstKind INT",
            [(*device_row(s), s.size, 1, 1, 2) for s in of("copy")]),
        "CUPTI_ACTIVITY_KIND_RUNTIME": (
            "start INT, end INT, eventClass INT, globalTid INT, correlationId INT, nameId INT, "
            "returnValue INT", runtime),
        "NVTX_EVENTS": ("start INT, end INT, eventType INT, text TEXT, textId INT, globalTid INT",
                        [nvtx(s) for s in of("scope", "operator")] + [(1, None, 34, "mark", None,
                                                                       global_pid)]),
        "TARGET_INFO_GPU": ("id INT, name TEXT", [(0, "NVIDIA H100")]),
        "TARGET_INFO_SESSION_START_TIME": ("utcEpochNs INT, utcTime TEXT", [(EPOCH_NS, "")]),
        "StringIds": ("id INTEGER PRIMARY KEY, value TEXT",
                      [(number, text) for text, number in texts.ids.items()]),
    })  # fmt: skip


def _ascend_shapes(shapes: str) -> str:
    return ";".join(",".join(map(str, shape)) for shape in json.loads(shapes or "[]"))


def write_ascend_json(path: Path, spans: list[Span]) -> Path:
    """Write `trace_view.json` in the profiler's output folder."""
    process = {"scope": 1, "operator": 1, "call": 2, "kernel": 3, "copy": 3, "wait": 3,
               "collective": 4}  # fmt: skip
    names = {1: "Python", 2: "CANN", 3: "Ascend Hardware", 4: "Communication"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in names.items()
    ]
    events.append({"ph": "M", "name": "thread_name", "pid": 4, "tid": 1,
                   "args": {"name": "Group group-0 Communication"}})  # fmt: skip
    for span in spans:
        at = EPOCH_NS + span.start
        event = {"ph": "X", "name": span.name, "pid": process[span.kind],
                 "tid": 1 if span.kind == "collective" else span.thread,
                 "ts": f"{at // 1000}.{at % 1000:03d}", "dur": span.length / 1000}  # fmt: skip
        if span.kind in ("scope", "operator"):
            event["cat"] = "cpu_op"
        if span.shapes:
            event["args"] = {"Input Dims": _ascend_shapes(span.shapes)}
        events.append(event)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(events))
    return path


def write_ascend_db(path: Path, spans: list[Span], *, rank: int = 0) -> Path:
    """Write `ascend_pytorch_profiler_RANK.db`; times are text in some versions."""
    texts = _Texts()
    types = {"acl": 20000, "node": 10000, "runtime": 5000, "op": 50001, "queue": 50002}
    levels = {"AscendCL": "acl", "Node": "node", "Runtime": "runtime"}
    thread_base = PID << 32
    operators, calls, tasks, computes, collectives, parts, steps = [], [], [], [], [], [], []
    task_id = 0
    for span in spans:
        start, end = EPOCH_NS + span.start, EPOCH_NS + span.start + span.length
        if span.kind in ("scope", "operator"):
            shapes = _ascend_shapes(span.shapes)
            link = span.operator if span.kind == "operator" else None
            operators.append((start, end, thread_base | span.thread, link, texts(span.name), None,
                              None, None, texts(shapes) if shapes else None, None,
                              types["op"]))  # fmt: skip
            if span.name.startswith("ProfilerStep#"):
                steps.append((int(span.name.split("#")[1]), start, end))
        elif span.kind == "call":
            level, name = span.name.split("@")
            calls.append((start, end, types[levels[level]], thread_base | span.thread, span.link,
                          texts(name)))  # fmt: skip
        elif span.kind == "collective":
            group = texts("group-0")
            collectives.append((texts(span.name), start, end, span.link, group, span.link, 0, 0, 4,
                                texts("RING"), 65536, texts("hcom_allReduce_")))  # fmt: skip
            task_id += 1
            tasks.append((start, end, 0, span.link, task_id, thread_base, texts("Notify_Wait"), 0,
                          span.thread, task_id, 0))  # fmt: skip
            parts.append((texts("Notify_Wait"), task_id, texts("Notify_Wait"), 0, texts("group-0"),
                          span.link))  # fmt: skip
        else:
            task_id += 1
            kind = "MEMCPY_ASYNC" if span.kind == "copy" else "AI_CORE"
            tasks.append((start, end, 0, span.link, task_id, thread_base, texts(kind), 0,
                          span.thread, task_id, 0))  # fmt: skip
            if span.kind == "kernel":
                computes.append((texts(span.name), task_id, 20, 20, texts("AI_CORE"),
                                 texts(span.name), None, None, None, None, None, None))  # fmt: skip
    links = {row[3] for row in operators if row[3] is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    return _create(path, {
        "PYTORCH_API": ("startNs TEXT, endNs TEXT, globalTid INT, connectionId INT, name INT, "
                        "sequenceNumber INT, fwdThreadId INT, inputDtypes INT, inputShapes INT, "
                        "callchainId INT, type INT", operators),
        "CANN_API": ("startNs INT, endNs INT, type INT, globalTid INT, connectionId INT, name INT",
                     calls),
        "TASK": ("startNs INT, endNs INT, deviceId INT, connectionId INT, globalTaskId INT, "
                 "globalPid INT, taskType INT, contextId INT, streamId INT, taskId INT, "
                 "modelId INT",
                 tasks),
        "COMPUTE_TASK_INFO": ("name INT, globalTaskId INT, blockDim INT, mixBlockDim INT, "
                              "taskType INT, opType INT, inputFormats INT, inputDataTypes INT, "
                              "inputShapes INT, outputFormats INT, outputDataTypes INT, "
                              "outputShapes INT", computes),
        "COMMUNICATION_OP": ("opName INT, startNs INT, endNs INT, connectionId INT, "
                             "groupName INT, opId INT, relay INT, retry INT, dataType INT, "
                             "algType INT, count INT, opType INT", collectives),
        "COMMUNICATION_TASK_INFO": ("name INT, globalTaskId INT, taskType INT, planeId INT, "
                                    "groupName INT, opId INT", parts),
        "CONNECTION_IDS": ("id INT, connectionId INT", [(link, link) for link in sorted(links)]),
        "STEP_TIME": ("id INT, startNs INT, endNs INT", steps),
        "RANK_DEVICE_MAP": ("rankId INT, deviceId INT", [(rank, 0)]),
        "HOST_INFO": ("hostUid TEXT, hostName TEXT", [("1", "")]),
        "META_DATA": ("name TEXT, value TEXT", [("SCHEMA_VERSION", "1.1.0")]),
        "ENUM_API_TYPE": ("id INT, name TEXT", [(number, name) for name, number in types.items()]),
        "STRING_IDS": ("id INT, value TEXT",
                       [(number, text) for text, number in texts.ids.items()]),
    })  # fmt: skip
