"""Traces are read in any layout; damaged ones up to or around the damage."""

import gzip
import json
import tracemalloc
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_profile import vendors
from ms_profile.analysis.operators import kernel_table, operator_table
from ms_profile.errors import TraceError
from ms_profile.trace.builder import TraceBuilder, in_order
from ms_profile.trace.columns import Trace
from ms_profile.trace.json_chunks import TraceText
from ms_profile.trace.reader import read_trace
from ms_profile.vendors.category import Category

Writer = Callable[[list[dict[str, Any]]], str]


def sample(count: int = 400) -> list[dict[str, Any]]:
    """Return spans with nested lists, texts with braces, and metadata."""
    events: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": 7,
            "tid": 0,
            "ts": 0.0,
            "args": {"name": "python"},
        }
    ]
    events.extend(
        {
            "ph": "X", "cat": "cpu_op", "name": f"aten::op{number % 5} }}, {{", "pid": 7,
            "tid": 7 + number % 2, "ts": 10.0 * number + 0.125, "dur": 5.001,
            "args": {"External id": number, "Input Dims": [[number % 3, 2], []],
                     "parts": [{"a": 1}, {"b": [2]}]},
        }
        for number in range(count)
    )  # fmt: skip
    return events


def read_in_chunks(path: Path, chunk_bytes: int) -> Trace:
    """Read a trace in small chunks, so that many chunk boundaries are crossed."""
    text = TraceText(path, chunk_bytes=chunk_bytes)
    builder = TraceBuilder()
    for records in text.records():
        builder.add(records)
    return builder.finish(text.header, text.warnings, 0)


def same_spans(left: Trace, right: Trace) -> bool:
    """Return whether two traces have the same spans."""
    columns = ("start_ns", "duration_ns", "category", "external")
    return all((getattr(left, c) == getattr(right, c)).all() for c in columns) and [
        left.name_of(row) for row in range(len(left))
    ] == [right.name_of(row) for row in range(len(right))]


@pytest.mark.parametrize("chunk_bytes", [700, 1501, 1 << 20])
def test_every_layout_gives_the_same_columns(
    tmp_path: Path, kineto_text: Writer, chunk_bytes: int
) -> None:
    """Kineto's layout, compact, spaced and indented JSON, a bare list and gzip."""
    events = sample()
    document = {"baseTimeNanoseconds": 1_000_000_000, "traceEvents": events, "traceName": "made"}
    texts = {
        "kineto": kineto_text(events),
        "compact": json.dumps(document, separators=(",", ":")),
        "spaced": json.dumps(document),
        "indented": json.dumps(document, indent=4),
        "facts_last": json.dumps({"traceEvents": events, "baseTimeNanoseconds": 1_000_000_000}),
    }
    traces = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        traces[name] = read_in_chunks(tmp_path / name, chunk_bytes)
        assert traces[name].warnings == (), name
    (tmp_path / "gzip").write_bytes(gzip.compress(texts["kineto"].encode()))
    traces["gzip"] = read_in_chunks(tmp_path / "gzip", chunk_bytes)
    assert len(traces["kineto"]) == 400
    assert traces["kineto"].start_ns.min() == 1_000_000_125
    assert all(same_spans(traces["kineto"], trace) for trace in traces.values())
    (tmp_path / "list").write_text(json.dumps(events))
    assert len(read_in_chunks(tmp_path / "list", chunk_bytes)) == 400


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_real_trace_matches_the_json_module(traces_folder: Path, strategy: str) -> None:
    """Every span, time, name and shape of torch's own traces."""
    path = traces_folder / strategy / "rank-00001.json.gz"
    trace = read_trace(path)
    raw = json.loads(gzip.decompress(path.read_bytes()))
    spans = [
        event for event in raw["traceEvents"] if event["ph"] == "X" and event.get("cat") != "Trace"
    ]
    assert (trace.rank, trace.world_size, trace.warnings) == (1, 2, ())
    expected = sorted(
        (
            raw["baseTimeNanoseconds"] + round(event["ts"] * 1000),
            round(event["dur"] * 1000),
            event["name"],
        )
        for event in spans
    )
    actual = sorted(
        (int(s), int(d), trace.names[n])
        for s, d, n in zip(trace.start_ns, trace.duration_ns, trace.name, strict=True)
    )
    assert actual == expected
    allocations = sum(event["name"] == "[memory]" for event in raw["traceEvents"])
    assert len(trace.memory.at_ns) == allocations > 0
    with_shapes = sum(bool(event.get("args", {}).get("Input Dims")) for event in spans)
    assert np.isin(trace.shape, [0]).sum() <= len(spans) - with_shapes
    assert len(trace.rows(Category.COLLECTIVE)) > 0


def test_a_truncated_trace_gives_its_prefix(tmp_path: Path, kineto_text: Writer) -> None:
    """Truncated at any byte after the first event, with one warning."""
    text = kineto_text(sample(60)).encode()
    first = text.index(b'"aten') + 400
    previous_count = 0
    for cut in range(first, len(text) - 40, 331):
        (tmp_path / "cut.json").write_bytes(text[:cut])
        trace = read_in_chunks(tmp_path / "cut.json", 2000)
        assert len(trace.warnings) == 1
        assert "truncated" in trace.warnings[0]
        assert previous_count <= len(trace) <= 60
        assert set(trace.external.tolist()) == set(range(len(trace)))
        previous_count = len(trace)
    assert previous_count >= 57


def test_a_truncated_gzip_trace_gives_its_prefix(tmp_path: Path, kineto_text: Writer) -> None:
    """A truncated or corrupt gzip file is read up to the damage, with a warning."""
    packed = gzip.compress(kineto_text(sample(4000)).encode())
    (tmp_path / "cut.json.gz").write_bytes(packed[: len(packed) // 2])
    trace = read_in_chunks(tmp_path / "cut.json.gz", 1 << 14)
    assert 1000 < len(trace) < 4000
    assert any("truncated" in warning for warning in trace.warnings)


@pytest.mark.parametrize("fraction", [0.3, 0.7, 0.999])
def test_a_small_truncated_gzip_trace_gives_its_prefix(
    tmp_path: Path, traces_folder: Path, fraction: float
) -> None:
    """Also if the damage is in the first chunk, as in a trace of few steps."""
    packed = (traces_folder / "ddp/rank-00000.json.gz").read_bytes()
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(packed)
    total = len(read_trace(path))
    path.write_bytes(packed[: int(len(packed) * fraction)])
    trace = read_trace(path)
    assert 0.15 * total * fraction < len(trace) <= total
    assert "truncated" in trace.warnings[0]


def test_damaged_events_are_skipped_and_counted(tmp_path: Path, kineto_text: Writer) -> None:
    """Garbage inside an event, or a field of a wrong type, loses only that event."""
    text = kineto_text(sample(50)).encode()
    position = text.index(b'"External id": 20')
    damaged = text[:position] + b"\x00\xff@@" + text[position + 4 :]
    damaged = damaged.replace(b'"External id": 30,', b'"External id": [],')
    (tmp_path / "damaged.json").write_bytes(damaged)
    trace = read_trace(tmp_path / "damaged.json")
    assert set(range(50)) - set(trace.external.tolist()) == {20, 30}
    assert "2 damaged events were skipped" in trace.warnings[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b'{"weights": [1, 2]}', "no traceEvents"),
        (b"\x89PNG\r\n", "no traceEvents"),
        (b'{"traceEvents": []}', "has no spans"),
        (b"[]", "has no spans"),
        (b"\x1f\x8bnot gzip", "gzip"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    """An empty, foreign or broken file gives a TraceError with its name and the reason."""
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(tmp_path / "odd.json")
    assert "odd.json" in str(caught.value)
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "missing.json")


@pytest.mark.parametrize("indent", [None, 1, 2, 4])
@pytest.mark.parametrize("lines", [0, 31, 40, 5000])
def test_fields_after_the_events_are_read_at_any_length(
    tmp_path: Path, indent: int | None, lines: int
) -> None:
    """Kineto writes log lines with brackets after the events, then rank and base time."""
    spans = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm é", "pid": 1, "tid": 1, "ts": 10.0 * n,
         "dur": 5.0, "args": {"Input Dims": [[2, 3], [3, 4]]}}
        for n in range(40)
    ]  # fmt: skip
    trace = {
        "traceEvents": spans,
        "INFO": [f'INFO:1:1 Profiler.cpp:{n}] a "}}] message' for n in range(lines)],
        "nested": [{"a": [n]} for n in range(lines)],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "baseTimeNanoseconds": 1_727_743_122_000_000_000,
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace, indent=indent, ensure_ascii=False), encoding="utf-8")
    result = read_trace(path)
    assert (len(result), result.rank, result.warnings) == (40, 3, ())
    assert int(result.start_ns[0]) == 1_727_743_122_000_000_000


def test_ascend_profiler_traces_are_read(tmp_path: Path) -> None:
    """Text timestamps keep nanoseconds; hardware, CANN and communication are distinguished."""

    def meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}

    def span(name: str, pid: int, tid: int, ts: str, **fields: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": 2.5, **fields}

    events = [
        meta("process_name", 1, 0, "Python"),
        meta("process_name", 2, 0, "CANN"),
        meta("process_name", 3, 0, "Ascend Hardware"),
        meta("process_name", 4, 0, "Communication(HCCL)"),
        meta("thread_name", 4, 1, "Group 0 Communication"),
        meta("thread_name", 4, 2, "Plane 0"),
        span("aten::mm", 1, 1, "1700000000000001.123", cat="cpu_op"),
        span("AscendCL@aclnnMatmul", 2, 1, "1700000000000002.001"),
        span("MatMulV3", 3, 5, "1700000000000003.002"),
        span("EVENT_WAIT", 3, 5, "1700000000000004.002"),
        span("hcom_allReduce__721_0_1", 4, 1, "1700000000000005.999"),
        span("Memcpy", 4, 2, "1700000000000006.000"),
    ]
    (tmp_path / "trace_view.json").write_text(json.dumps(events))
    trace = read_trace(tmp_path / "trace_view.json")
    spans = {
        trace.name_of(r): (Category(trace.category[r]), int(trace.start_ns[r])) for r in range(6)
    }
    assert spans["aten::mm"] == (Category.OPERATOR, 1_700_000_000_000_001_123)
    assert spans["AscendCL@aclnnMatmul"][0] is Category.RUNTIME
    assert spans["MatMulV3"][0] is Category.KERNEL
    assert spans["EVENT_WAIT"][0] is Category.DEVICE_WAIT
    assert spans["hcom_allReduce__721_0_1"] == (Category.COLLECTIVE, 1_700_000_000_000_005_999)
    assert spans["Memcpy"][0] is Category.OTHER
    assert {row.name for row in kernel_table(trace)} == {"MatMulV3", "hcom_allReduce__721_0_1"}
    assert all(row.device_ns is None for row in operator_table(trace))


def test_the_rank_comes_from_the_file_name_as_a_fallback(
    tmp_path: Path, kineto_text: Writer
) -> None:
    """`trace_rank3.json` is rank 3."""
    (tmp_path / "trace_rank3.json").write_text(kineto_text(sample(3)))
    assert read_trace(tmp_path / "trace_rank3.json").rank == 3


def test_collective_notes_do_not_keep_the_file_in_memory(tmp_path: Path) -> None:
    """With a collective in every chunk of a long trace, only its columns stay in memory."""
    padding = "1, " * 20_000
    events = [
        {
            "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32",
            "pid": 0, "tid": 7, "ts": float(number), "dur": 0.5,
            "args": {"Collective name": "allreduce", "Process Group Ranks": [0, 1],
                     "Concrete Inputs": padding},
        }
        for number in range(200)
    ]  # fmt: skip
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    tracemalloc.start()
    trace = read_trace(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [note.ranks for note in trace.messages.values()] == [(0, 1)] * 200
    # Several chunks of half a megabyte at once: read, joined, and referenced by raw fields.
    assert peak_bytes < 4 << 20 < path.stat().st_size / 2


def test_rows_are_ordered_by_thread_then_start_then_longest_first() -> None:
    """Also with many equal starts, as from a clock with microseconds."""
    random = np.random.default_rng(7)
    for count in (0, 1, 2, 5, 300):
        thread = random.integers(0, 3, count).astype(np.int32)
        start = random.integers(0, count // 3 + 1, count)
        duration = random.integers(0, 4, count)
        expected = np.lexsort((-duration, start, thread))
        assert in_order(thread, start, duration).tolist() == expected.tolist()


def test_every_vendor_file_is_registered() -> None:
    """Every file of `vendors/` is a vendor, except the two that define the interface."""
    folder = Path(vendors.__path__[0])
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "vendor", "category"}
    registered = [import_module(f"{vendors.__name__}.{name}").VENDOR for name in names]
    assert len(registered) == len(vendors.VENDORS) >= 6
    assert all(vendor in vendors.VENDORS for vendor in registered)
