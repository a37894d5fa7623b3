"""Operators by name: calls, total and self time on the host, and time on the device."""

from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ms_profile.trace.categories import HOST_COLLECTIVE
from ms_profile.trace.columns import Trace, matching
from ms_profile.trace.nesting import parents, self_times
from ms_profile.vendors.category import Category

HOST = (Category.OPERATOR, Category.ANNOTATION, Category.RUNTIME, Category.COLLECTIVE)
DEVICE = (Category.KERNEL, Category.COPY, Category.COLLECTIVE)


@frozen(kw_only=True)
class Operator:
    """All calls of one operator (and one shape, where asked for)."""

    name: str
    category: Category
    shape: str
    """Input shapes as the profiler wrote them; empty where not asked for or not recorded."""
    calls: int
    total_ns: int
    """Time inside it, its children included; recursion counts once a call."""
    self_ns: int
    """Time inside it and in none of its children."""
    device_ns: int | None
    """Time of the kernels that it launched itself; None where the trace has no device."""


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
    """Sum up the host's operators, scopes, driver calls and collectives, most self time first.

    A call that began before the trace is not in it, so totals are of whole calls alone.
    """
    rows = _host_rows(trace)
    if not len(rows):
        return ()
    duration = trace.duration_ns[rows]
    own = _self_times(trace, rows)
    device = _device_times(trace, rows)
    shape = trace.shape[rows].astype(np.int64) if by_shape else np.zeros(len(rows), np.int64)
    key = (shape << 32) | (trace.name[rows].astype(np.int64) << 8) | trace.category[rows]
    unique, group = np.unique(key, return_inverse=True)
    calls, total, own_sum = _sums(group, len(unique), np.ones(len(rows)), duration, own)
    device_sum = None if device is None else _sums(group, len(unique), device)[0]
    table = []
    for place in np.argsort(-own_sum, kind="stable").tolist():
        code = int(unique[place])
        table.append(
            Operator(
                name=trace.names[code >> 8 & 0xFFFFFF],
                category=Category(code & 0xFF),
                shape=trace.shapes[code >> 32],
                calls=int(calls[place]),
                total_ns=int(total[place]),
                self_ns=int(own_sum[place]),
                device_ns=None if device_sum is None else int(device_sum[place]),
            )
        )
    return tuple(table)


def kernel_table(trace: Trace) -> tuple[Kernel, ...]:
    """Sum up what ran on devices, most time first; empty where the trace has no device."""
    rows = trace.rows(*DEVICE)
    rows = rows[~_carried_by_host(trace, rows)]
    table = []
    if not len(rows):
        return ()
    unique, group = np.unique(trace.name[rows], return_inverse=True)
    order = np.argsort(group, kind="stable")
    edges = np.searchsorted(group[order], np.arange(len(unique)))
    duration = trace.duration_ns[rows][order]
    total = np.add.reduceat(duration, edges)
    low, high = np.minimum.reduceat(duration, edges), np.maximum.reduceat(duration, edges)
    calls = np.diff(np.append(edges, len(order)))
    for place in np.argsort(-total, kind="stable").tolist():
        row = rows[order[edges[place]]]
        table.append(
            Kernel(
                name=trace.name_of(row), category=Category(int(trace.category[row])),
                calls=int(calls[place]), total_ns=int(total[place]),
                shortest_ns=int(low[place]), longest_ns=int(high[place]),
            )
        )  # fmt: skip
    return tuple(table)


def _host_rows(trace: Trace) -> NDArray[np.int64]:
    """Find the rows that nest on the host's threads: a device's collectives don't."""
    rows = trace.rows(*HOST)
    on_device = (trace.category[rows] == Category.COLLECTIVE) & ~_carried_by_host(trace, rows)
    host: NDArray[np.int64] = rows[~on_device]
    return host


def _carried_by_host(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether each is a collective that a host thread carries out, as gloo's are, (N,)."""
    found: NDArray[np.bool_] = matching(trace.names, HOST_COLLECTIVE)[trace.name[rows]]
    return found


def _device_times(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Sum the device time that each host row launched itself, (N,) ns; None without a device."""
    launched = trace.rows(*DEVICE)
    launched = launched[(trace.external[launched] > 0) & ~_carried_by_host(trace, launched)]
    if not len(launched):
        return None
    operators = np.flatnonzero(
        (trace.category[rows] == Category.OPERATOR) & (trace.external[rows] > 0)
    )
    found = np.zeros(len(rows), np.int64)
    if not len(operators):
        return found
    numbers = trace.external[rows][operators]
    order = np.argsort(numbers, kind="stable")
    wanted = trace.external[launched]
    place = np.minimum(np.searchsorted(numbers[order], wanted), len(order) - 1)
    matches = numbers[order][place] == wanted
    target = operators[order[place[matches]]]
    np.add.at(found, target, trace.duration_ns[launched[matches]])
    return found


def _self_times(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    start, duration = trace.start_ns[rows], trace.duration_ns[rows]
    return self_times(start, duration, parents(trace.thread[rows], start, duration))


def _sums(group: NDArray[Any], size: int, *columns: NDArray[Any]) -> list[NDArray[np.int64]]:
    # A float64 sum is exact below 2**53 ns, 104 days.
    return [
        np.rint(np.bincount(group, weights=column, minlength=size)).astype(np.int64)
        for column in columns
    ]
