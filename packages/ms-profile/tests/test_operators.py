"""Operators' self and total times against a stack, and against counting in the JSON."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_profile.analysis.operators import kernel_table, operator_table
from ms_profile.trace.builder import TraceBuilder
from ms_profile.trace.columns import Trace
from ms_profile.trace.nesting import parents, self_times
from ms_profile.trace.reader import read_trace
from ms_profile.trace.records import Arguments, TraceEvent


@st.composite
def nested_spans(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Draw well-nested spans (thread, start, length), sorted by thread, start, longest first."""
    spans: list[tuple[int, int, int]] = []

    def fill(thread: int, start: int, end: int, depth: int) -> None:
        position = start
        for _ in range(draw(st.integers(0, 3))):
            if end - position < 2:
                return
            child_start = draw(st.integers(position, end - 1))
            child_end = draw(st.integers(child_start + 1, end))
            spans.append((thread, child_start, child_end - child_start))
            if depth:
                fill(thread, child_start, child_end, depth - 1)
            position = child_end

    for thread in range(draw(st.integers(1, 3))):
        fill(thread, 0, 200, 3)
    return sorted(spans, key=lambda span: (span[0], span[1], -span[2]))


@given(nested_spans())
def test_parents_and_self_times_match_a_stack(spans: list[tuple[int, int, int]]) -> None:
    """The level-by-level algorithm gives the result of walking a stack, span by span."""
    table = np.array(spans, np.int64).reshape(-1, 3)
    thread, start, length = table[:, 0], table[:, 1], table[:, 2]
    self_ns = length.copy()
    expected, stack = [], []
    for row in range(len(table)):
        while stack and (
            thread[stack[-1]] != thread[row] or start[stack[-1]] + length[stack[-1]] <= start[row]
        ):
            stack.pop()
        expected.append(stack[-1] if stack else -1)
        if stack:
            self_ns[stack[-1]] -= length[row]
        stack.append(row)
    actual = parents(thread, start, length)
    assert actual.tolist() == expected
    assert self_times(start, length, actual).tolist() == self_ns.tolist()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_real_traces_operators_agree_with_plain_counting(
    traces_folder: Path, strategy: str
) -> None:
    """Calls and totals per name are sums over the JSON; self times are between 0 and totals."""
    path = traces_folder / strategy / "rank-00000.json.gz"
    table = operator_table(read_trace(path))
    calls: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
        if event["ph"] == "X" and event.get("cat") in ("cpu_op", "user_annotation"):
            calls[event["name"]] += 1
            total[event["name"]] += round(event["dur"] * 1000)
    assert {row.name: row.calls for row in table} == dict(calls)
    assert {row.name: row.total_ns for row in table} == dict(total)
    assert all(0 <= row.self_ns <= row.total_ns and row.device_ns is None for row in table)
    assert [row.self_ns for row in table] == sorted((row.self_ns for row in table), reverse=True)


def test_rows_by_shape_sum_to_the_operators_row(traces_folder: Path) -> None:
    """For calls and self times."""
    trace = read_trace(traces_folder / "ddp" / "rank-00000.json.gz")
    by_name = {row.name: row for row in operator_table(trace)}
    by_shape = [row for row in operator_table(trace, by_shape=True) if row.name == "aten::addmm"]
    assert len({row.shape for row in by_shape}) == len(by_shape) > 1
    assert sum(row.calls for row in by_shape) == by_name["aten::addmm"].calls
    assert sum(row.self_ns for row in by_shape) == by_name["aten::addmm"].self_ns


def test_device_time_goes_to_the_operator_that_launched_it() -> None:
    """A kernel counts for the operator with its external id, not for that operator's parents."""
    builder = TraceBuilder()
    host = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1}
    builder.add(
        [
            TraceEvent(**host, name="aten::linear", ts=0, dur=100, args=Arguments(external=1)),
            TraceEvent(**host, name="aten::addmm", ts=10, dur=50, args=Arguments(external=2)),
            TraceEvent(ph="X", cat="kernel", name="gemm", pid=0, tid=7, ts=70, dur=200,
                   args=Arguments(external=2, correlation=9)),
            TraceEvent(ph="X", cat="kernel", name="gemm", pid=0, tid=7, ts=280, dur=100,
                   args=Arguments(external=2, correlation=10)),
        ]
    )  # fmt: skip
    trace = builder.finish({}, (), 0)
    device_ns = {row.name: row.device_ns for row in operator_table(trace)}
    assert device_ns == {"aten::linear": 0, "aten::addmm": 300_000}
    (kernel,) = kernel_table(trace)
    assert (kernel.calls, kernel.total_ns) == (2, 300_000)
    assert (kernel.shortest_ns, kernel.longest_ns) == (100_000, 200_000)


def test_without_a_device_the_kernel_table_is_empty(make_trace: Callable[..., Trace]) -> None:
    """It has no rows of zeros."""
    assert kernel_table(make_trace([("cpu_op", "aten::mm", 1, 0.0, 5.0)])) == ()
