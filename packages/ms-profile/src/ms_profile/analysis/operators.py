"""Operators and kernels by name: calls, total and self time on the host, time on the device."""

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.arguments import check_type
from ms_profile.errors import TraceError
from ms_profile.trace.categories import HOST_COLLECTIVE
from ms_profile.trace.columns import Trace, matching
from ms_profile.trace.nesting import parents, self_times
from ms_profile.vendors.category import Category

HOST = (Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME, Category.COLLECTIVE)
DEVICE = (Category.KERNEL, Category.COPY, Category.COLLECTIVE)


@frozen(kw_only=True)
class Operator:
    """All calls of one operator, optionally of one input shape."""

    name: str
    category: Category
    shape: str
    """Input shapes as written by the profiler; empty if not requested or not recorded."""
    calls: int
    total_ns: int
    """Time including children; a recursive call counts once per level."""
    self_ns: int
    """Time excluding children."""
    device_ns: int | None
    """Time of the kernels that it launched directly; None if the trace has no device."""


@frozen(kw_only=True)
class Kernel:
    """All runs of one kernel or copy on a device."""

    name: str
    category: Category
    calls: int
    total_ns: int
    shortest_ns: int
    longest_ns: int


def operator_table(trace: Trace, *, by_shape: bool = False) -> tuple[Operator, ...]:
    """Aggregate the host's operators, scopes, driver calls and collectives, most self time first.

    Calls that started before the trace are not in it, so totals are of complete calls.

    Args:
        trace: trace of one rank.
        by_shape: one row per operator and input shape, instead of one per operator.
    """
    check_type("trace", trace, Trace, "a Trace, as read_trace returns", error=TraceError)
    rows = _host_rows(trace)
    if not len(rows):
        return ()
    duration = trace.duration_ns[rows]
    self_ns = _self_times(trace, rows)
    device = _device_times(trace, rows)
    shape = trace.shape[rows].astype(np.int64) if by_shape else np.zeros(len(rows), np.int64)
    # Packed key: shape in the high 32 bits, then 24 bits of name, 8 bits of category.
    key = (shape << 32) | (trace.name[rows].astype(np.int64) << 8) | trace.category[rows]
    unique, group = np.unique(key, return_inverse=True)
    calls, total, self_sum = _sums(group, len(unique), np.ones(len(rows)), duration, self_ns)
    device_sum = None if device is None else _sums(group, len(unique), device)[0]
    table = []
    for index in np.argsort(-self_sum, kind="stable").tolist():
        packed = int(unique[index])
        table.append(
            Operator(
                name=trace.names[packed >> 8 & 0xFFFFFF],
                category=Category(packed & 0xFF),
                shape=trace.shapes[packed >> 32],
                calls=int(calls[index]),
                total_ns=int(total[index]),
                self_ns=int(self_sum[index]),
                device_ns=None if device_sum is None else int(device_sum[index]),
            )
        )
    return tuple(table)


def kernel_table(trace: Trace) -> tuple[Kernel, ...]:
    """Aggregate kernels and copies on devices, most time first; empty without a device."""
    check_type("trace", trace, Trace, "a Trace, as read_trace returns", error=TraceError)
    rows = trace.rows(*DEVICE)
    rows = rows[~_runs_on_host(trace, rows)]
    table = []
    if not len(rows):
        return ()
    unique, group = np.unique(trace.name[rows], return_inverse=True)
    order = np.argsort(group, kind="stable")
    # order[edges[k] : edges[k + 1]] are the rows of kernel k.
    edges = np.searchsorted(group[order], np.arange(len(unique)))
    duration = trace.duration_ns[rows][order]
    total = np.add.reduceat(duration, edges)
    low, high = np.minimum.reduceat(duration, edges), np.maximum.reduceat(duration, edges)
    calls = np.diff(np.append(edges, len(order)))
    for index in np.argsort(-total, kind="stable").tolist():
        row = rows[order[edges[index]]]
        table.append(
            Kernel(
                name=trace.name_of(row), category=Category(int(trace.category[row])),
                calls=int(calls[index]), total_ns=int(total[index]),
                shortest_ns=int(low[index]), longest_ns=int(high[index]),
            )
        )  # fmt: skip
    return tuple(table)


def _host_rows(trace: Trace) -> NDArray[np.int64]:
    """Return the rows that nest on host threads, which excludes a device's collectives."""
    rows = trace.rows(*HOST)
    on_device = (trace.category[rows] == Category.COLLECTIVE) & ~_runs_on_host(trace, rows)
    host: NDArray[np.int64] = rows[~on_device]
    return host


def _runs_on_host(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which rows are collectives run by a host thread, as gloo's are, (N,)."""
    is_host: NDArray[np.bool_] = matching(trace.names, HOST_COLLECTIVE)[trace.name[rows]]
    return is_host


def _device_times(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the device time launched directly by each host row, (N,) ns; None without a device."""
    # Kineto gives a kernel the id of the operator that launched it.
    launched = trace.rows(*DEVICE)
    launched = launched[(trace.external[launched] > 0) & ~_runs_on_host(trace, launched)]
    if not len(launched):
        return None
    operators = np.flatnonzero(
        (trace.category[rows] == Category.OPERATOR) & (trace.external[rows] > 0)
    )
    device_ns = np.zeros(len(rows), np.int64)
    if not len(operators):
        return device_ns
    operator_ids = trace.external[rows][operators]
    order = np.argsort(operator_ids, kind="stable")
    launcher_ids = trace.external[launched]
    # Join by id; the launcher may be outside the trace, so the found id must be compared.
    index = np.minimum(np.searchsorted(operator_ids[order], launcher_ids), len(order) - 1)
    matches = operator_ids[order][index] == launcher_ids
    target = operators[order[index[matches]]]
    # `+=` would add only one kernel per operator: `target` has duplicates.
    np.add.at(device_ns, target, trace.duration_ns[launched[matches]])
    return device_ns


def _self_times(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    start, duration = trace.start_ns[rows], trace.duration_ns[rows]
    return self_times(start, duration, parents(trace.thread[rows], start, duration))


def _sums(group: NDArray[Any], size: int, *columns: NDArray[Any]) -> list[NDArray[np.int64]]:
    # float64 sums are exact below 2**53 ns (104 days).
    return [
        np.rint(np.bincount(group, weights=column, minlength=size)).astype(np.int64)
        for column in columns
    ]
